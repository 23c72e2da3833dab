"""Headers of safetensors files: what is right is read like the library reads it, what is wrong is refused by name."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.loading import Checkpoint, load_checkpoint_in_model, save_model

Write = Callable[..., Path]


def one(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_entries_point_at_the_bytes(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(True), "d": torch.empty(0, 7), "e": torch.tensor(3)}
    save_file(state, tmp_path / "x.safetensors", metadata={"format": "pt", "who": "me"})
    checkpoint = Checkpoint.open(tmp_path / "x.safetensors")
    assert checkpoint.format == "safetensors"
    assert checkpoint.metadata == {"format": "pt", "who": "me"}
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in state.values())
    content = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in state.items():
        entry = checkpoint.entries[name]
        assert (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert content[entry.offset : entry.offset + entry.nbytes] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_pairs_of_4_bit_numbers_are_counted_as_torch_counts_them(tmp_path: Path) -> None:
    pairs = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float4_e2m1fn_x2)
    save_file({"w": pairs}, tmp_path / "x.safetensors")
    entry = Checkpoint.open(tmp_path / "x.safetensors").entries["w"]
    assert (entry.shape, entry.dtype, entry.nbytes) == ((4, 8), torch.float4_e2m1fn_x2, 32)
    model = nn.Module()
    model.register_buffer("w", torch.zeros_like(pairs.view(torch.uint8)).view(pairs.dtype))
    load_checkpoint_in_model(model, tmp_path / "x.safetensors")
    assert torch.equal(model.w.view(torch.uint8), pairs.view(torch.uint8))
    save_model(model, tmp_path / "saved")
    again = load_file(tmp_path / "saved" / "model.safetensors")["w"]
    assert again.dtype == pairs.dtype
    assert torch.equal(again.view(torch.uint8), pairs.view(torch.uint8))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".gguf"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "pointer of git LFS.*git lfs pull"),
        (b"\n<!DOCTYPE html><html><head></head></html>", "a web page, not a checkpoint"),
    ],
)
def test_what_comes_in_the_place_of_a_file_is_called_by_its_name(tmp_path: Path, suffix: str, content: bytes, says: str) -> None:
    (tmp_path / f"model{suffix}").write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": one([2], 0, 8)}, b"x" * 4, r"truncated: expected \d+ bytes, found \d+"),
        ({"a": one([2], 0, 8)}, b"x" * 12, "4 at the end belong to no tensor"),
        ({"a": one([1], 0, 4), "b": one([1], 8, 12)}, b"x" * 12, "4 bytes between 'a' and 'b' belong to no tensor"),
        ({"a": one([1], 4, 8)}, b"x" * 8, "belong to no tensor"),
        ({"a": one([2], 0, 8), "b": one([2], 4, 12)}, b"x" * 12, "'a' and 'b' overlap"),
        ({"a": one([3], 0, 8)}, b"x" * 8, "'a' of shape .3. and dtype F32 needs 12 bytes; its offsets hold 8"),
        ({"a": one([2], 8, 0)}, b"x" * 8, "impossible offsets"),
        ({"a": one([-2], 0, 8)}, b"x" * 8, "impossible shape"),
        ({"a": one([True], 0, 4)}, b"x" * 4, "impossible shape"),
        ({"a": one([1 << 70], 0, 4)}, b"x" * 4, "impossible shape"),
        ({"a": one([1] * 70, 0, 4)}, b"x" * 4, "impossible shape"),
        ({"a": one([0, 1 << 62, 1 << 62], 0, 0)}, b"", "impossible shape"),
        ({"a": one([1], 0, 4, "F33")}, b"x" * 4, "unknown dtype 'F33'"),
        ({"a": one([3], 0, 2, "F4")}, b"xx", "last dimension should be even"),
        ({"a": one([], 0, 1, "F4")}, b"x", "last dimension should be even"),
        ({"a": {"dtype": "F32"}}, b"", "lacks"),
        ({"a": 3}, b"", "lacks"),
        ([1, 2], b"", "not a JSON object"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        (b'{"a": {}, "a": {}}', b"", "holds 'a' twice"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", b"", "not valid JSON"),
        (b"", b"", "not valid JSON"),
    ],
)
def test_damage_is_refused_and_the_file_named(tmp_path: Path, write_raw: Write, header: object, data: bytes, says: str) -> None:
    file = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says) as error:
        Checkpoint.open(file)
    assert str(file) in str(error.value)


def test_absurd_header_lengths_are_refused_before_memory_is_taken(tmp_path: Path, write_raw: Write) -> None:
    with pytest.raises(CheckpointError, match=f"claims {1 << 62} bytes"):
        Checkpoint.open(write_raw(tmp_path / "a.safetensors", {}, length=1 << 62))
    with pytest.raises(CheckpointError, match="expected at least 1008 bytes, found 10"):
        Checkpoint.open(write_raw(tmp_path / "b.safetensors", {}, length=1000))
    (tmp_path / "c.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="expected at least 8 bytes, found 3"):
        Checkpoint.open(tmp_path / "c.safetensors")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such file"):
        Checkpoint.open(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError):
        Checkpoint.open(tmp_path / "nothing")


VALID = json.dumps({"__metadata__": {"format": "pt"}, "a": one([2, 2], 0, 16), "b": one([3], 16, 22, "BF16")}).encode()


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID) + 30), st.binary(max_size=3)), max_size=4),
    cut=st.integers(0, 6),
)
def test_a_mutated_file_is_opened_only_if_the_library_opens_it_too(edits: list[tuple[int, bytes]], cut: int) -> None:
    content = bytearray(struct.pack("<Q", len(VALID)) + VALID + bytes(22))
    for position, replacement in edits:
        content[position : position + len(replacement)] = replacement
    content = content[: len(content) - cut]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.safetensors")
        file.write_bytes(content)
        try:
            checkpoint = Checkpoint.open(file)
        except CheckpointError:
            return
        try:
            with safe_open(file, "pt") as library:
                keys = set(library.keys())
        except SafetensorError as error:
            pytest.fail(f"opened what the library refuses: {error}")
        assert set(checkpoint.entries) == keys


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=1, max_size=3) | json_values,
    }
)


@settings(max_examples=200, deadline=None)
@given(header=st.dictionaries(st.text(max_size=5), near_entries | json_values, max_size=3), data=st.binary(max_size=16))
def test_any_header_is_opened_or_refused_cleanly(header: dict[str, Any], data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.safetensors")
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        try:
            checkpoint = Checkpoint.open(file)
        except CheckpointError:
            return
        for entry in checkpoint.entries.values():
            assert 8 + len(text) <= entry.offset <= entry.offset + entry.nbytes <= file.stat().st_size
