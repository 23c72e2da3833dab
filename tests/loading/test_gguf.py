"""GGUF files: names, shapes and values as the gguf package has them, quantized ones unpacked on the way, damage refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, Reader, Whole, load, transfer

QUANTIZED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.BF16, Kind.F16]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def write(file: Path, tensors: dict[str, tuple[np.ndarray, Kind | None]], metadata: bool = True) -> Path:
    """With the package's own writer."""
    writer = gguf.GGUFWriter(file, "llama")
    if metadata:
        writer.add_string("general.name", "tiny")
        writer.add_uint32("llama.block_count", 2)
        writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "déf"] * 10)
        writer.add_array("tokenizer.ggml.scores", [0.5] * 30)
        writer.add_string("tokenizer.chat_template", "x" * 5000)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mixed(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors: dict[str, tuple[np.ndarray, Kind | None]] = {
        "plain.f32": (values(3, 5), None),
        "plain.f16": (values(7).astype(np.float16), None),
    }
    expected = {name: torch.from_numpy(array.copy()) for name, (array, _) in tensors.items()}
    tensors["plain.i32"] = np.arange(6, dtype=np.int32).reshape(2, 3), None
    expected["plain.i32"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    for kind in QUANTIZED:
        packed = gguf.quantize(values(6, 64, seed=kind.value), kind)
        tensors[f"q.{kind.name}"] = packed, kind
        expected[f"q.{kind.name}"] = torch.from_numpy(gguf.dequantize(packed, kind).copy()).view(6, 64)
    rows = np.random.default_rng(1).integers(0, 60, (4, 3, 2 * 144), dtype=np.uint8)
    tensors["experts.Q4_K"] = rows, Kind.Q4_K
    expected["experts.Q4_K"] = torch.from_numpy(gguf.dequantize(rows, Kind.Q4_K).copy())
    flat = gguf.quantize(values(96), Kind.Q8_0)
    tensors["vector.Q8_0"] = flat, Kind.Q8_0
    expected["vector.Q8_0"] = torch.from_numpy(gguf.dequantize(flat, Kind.Q8_0).copy())
    return write(folder / "model.gguf", tensors), expected


def read(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    jobs = []
    for name, entry in checkpoint.entries.items():
        jobs.append((transfer.lower(Whole(name), checkpoint.entries, name, entry.dtype), torch.empty(entry.shape, dtype=entry.dtype)))
    Reader(checkpoint.identities).read(jobs)
    return {made.target: tensor for made, tensor in jobs}


@pytest.mark.parametrize("together_bytes", [1, 600, 4 << 20])
def test_values_are_those_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together_bytes: int) -> None:
    monkeypatch.setattr(transfer, "UNPACKED_BYTES", together_bytes)
    file, expected = mixed(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.format, checkpoint.files) == ("gguf", (file,))
    assert checkpoint.metadata["general.name"] == "tiny"
    assert checkpoint.metadata["llama.block_count"] == "2"
    assert "tokenizer.ggml.tokens" not in checkpoint.metadata
    found = read(checkpoint)
    assert {name: tuple(entry.shape) for name, entry in checkpoint.entries.items()} == {
        name: tuple(v.shape) for name, v in expected.items()
    }
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name
    assert checkpoint.entries["q.BF16"].dtype == torch.bfloat16
    assert checkpoint.entries["q.Q4_0"].dtype == torch.float32
    assert checkpoint.entries["q.Q4_0"].nbytes == 6 * 2 * 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_filled_and_rows_are_read_from_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    packed = gguf.quantize(values(40, 64), Kind.Q4_0)
    write(tmp_path / "model.gguf", {"weight": (packed, Kind.Q4_0)})
    expected = torch.from_numpy(gguf.dequantize(packed, Kind.Q4_0).copy()).to(dtype)
    with torch.device("meta"):
        model = nn.Embedding(40, 64, dtype=dtype)
    load(model, Checkpoint.open(tmp_path))
    assert torch.equal(model.weight, expected)
    report = load(model, Checkpoint.open(tmp_path), {"": "disk"})
    assert report.store is not None
    rows = torch.empty(3, 64, dtype=dtype)
    report.store.read_rows("weight", torch.tensor([7, 39, 7]), rows)
    assert torch.equal(rows, expected[[7, 39, 7]])


def test_quantized_values_in_a_quantized_model_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", {"weight": (gguf.quantize(values(4, 32), Kind.Q8_0), Kind.Q8_0)})
    model = nn.Linear(32, 4, bias=False)
    model.weight = nn.Parameter(torch.zeros(4, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"weight .*torch.float32 in the checkpoint, torch.int8 in the model"):
        load(model, Checkpoint.open(tmp_path))


def test_the_package_is_needed_for_quantized_tensors_alone(tmp_path: Path) -> None:
    write(tmp_path / "plain.gguf", {"weight": (values(4, 32), None)})
    write(tmp_path / "packed.gguf", {"weight": (gguf.quantize(values(4, 32), Kind.Q8_0), Kind.Q8_0)})
    program = (
        "import sys; sys.modules['gguf'] = None\n"
        "from bigmodel import Checkpoint, MissingPackageError\n"
        "print(list(Checkpoint.open(sys.argv[1]).entries))\n"
        "try: Checkpoint.open(sys.argv[2])\n"
        "except MissingPackageError as error: print(error)\n"
    )
    files = [str(tmp_path / "plain.gguf"), str(tmp_path / "packed.gguf")]
    run = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.startswith("['weight']")
    assert "'weight' is quantized" in run.stdout
    assert "bigmodel[gguf]" in run.stdout


def text(content: str | bytes) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(*parts: bytes, pairs: int = 0, tensors: int = 0, version: int = 3, data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)
    return head + bytes(-len(head) % 32 if data else 0) + data


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GG", "truncated or damaged"),
        (b"PK\3\4" + bytes(40), "does not begin like a GGUF file"),
        (raw(version=1), "version 1"),
        (raw(version=3 << 24), "big-endian"),
        (raw(pairs=1 << 60), "truncated or damaged"),
        (raw(tensors=1 << 60), "truncated or damaged"),
        (raw(pair("a", 4, b"1234"), pair("a", 4, b"1234"), pairs=2), "holds 'a' twice"),
        (raw(pair("a", 13, b""), pairs=1), "unknown type 13"),
        (raw(pair("a", 8, struct.pack("<Q", 1 << 62)), pairs=1), "truncated or damaged"),
        (raw(struct.pack("<Q", 1 << 62), pairs=1), "a string of"),
        (raw(text(b"\xff\xfe"), pairs=1), "no text"),
        (raw(pair("a", 9, struct.pack("<IQ", 0, 1 << 62)), pairs=1), "truncated or damaged"),
        (raw(pair("a", 9, struct.pack("<IQ", 8, 1 << 62)), pairs=1), "more than any model has"),
        (raw(pair("a", 9, struct.pack("<IQ", 9, 1) * 9), pairs=1), "unknown type 9"),
        (raw(pair("general.alignment", 4, struct.pack("<I", 3)), pairs=1), "impossible alignment 3"),
        (raw(pair("general.alignment", 4, struct.pack("<I", 0)), pairs=1), "impossible alignment 0"),
        (raw(pair("general.alignment", 8, text("x")), pairs=1), "impossible alignment 'x'"),
        (raw(tensor("t", [1, 1, 1, 1, 1], 0, 0), tensors=1), "has 5 dimensions"),
        (raw(tensor("t", [1 << 40, 1 << 40], 0, 0), tensors=1), "impossible shape"),
        (raw(tensor("t", [1 << 40, 1 << 40, 0], 0, 0), tensors=1), "impossible shape"),
        (raw(tensor("t", [4], 0, 0), tensors=1, data=bytes(15)), "truncated: expected at least"),
        (raw(tensor("t", [4], 0, 0), tensors=1, data=bytes(99)), "the rest belongs to no tensor"),
        (raw(tensor("t", [4], 0, 32), tensors=1, data=bytes(48)), "leave a hole"),
        (raw(tensor("t", [4], 0, 0), tensor("u", [4], 0, 0), tensors=2, data=bytes(16)), "overlap"),
        (raw(tensor("t", [4], 0, 0), tensor("t", [4], 0, 32), tensors=2, data=bytes(48)), "holds the tensor 't' twice"),
        (raw(tensor("t", [4], 99, 0), tensors=1, data=bytes(16)), "has the type 99"),
        (raw(tensor("t", [31], 8, 0), tensors=1, data=bytes(34)), "rows are not whole blocks of 32"),
        (raw(tensor("t", [256], 15, 0), tensors=1, data=bytes(292)), "is Q8_K, which the package gguf cannot unpack"),
    ],
)
def test_damage_is_refused_and_the_file_named(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as error:
        Checkpoint.open(file)
    assert str(file) in str(error.value)


def test_a_file_with_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(raw())
    assert dict(Checkpoint.open(tmp_path / "x.gguf").entries) == {}


def test_several_quantizations_in_a_folder_are_listed(tmp_path: Path) -> None:
    for name in ("m-Q4_0", "m-Q8_0"):
        write(tmp_path / f"{name}.gguf", {"weight": (values(4, 32), None)})
    with pytest.raises(CheckpointError, match=r"m-Q4_0\.gguf, m-Q8_0\.gguf"):
        Checkpoint.open(tmp_path)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "m-00001-of-00002.gguf", {"a": (values(4, 32), None)})
    write(tmp_path / "m-00002-of-00002.gguf", {"b": (values(4, 32), None)}, metadata=False)
    assert set(Checkpoint.open(tmp_path).entries) == {"a", "b"}


@pytest.fixture
def one_of_each(tmp_path: Path) -> Callable[..., Path]:
    def make(*names: str) -> Path:
        for name in names:
            if name.endswith(".gguf"):
                write(tmp_path / name, {"g": (values(4, 32), None)})
            else:
                torch.save({"t": torch.ones(2)}, tmp_path / name)
        return tmp_path

    return make


def test_usual_files_of_one_format_win_and_two_are_ambiguous(one_of_each: Callable[..., Path]) -> None:
    assert set(Checkpoint.open(one_of_each("pytorch_model.bin", "some-Q4.gguf")).entries) == {"t"}
    with pytest.raises(CheckpointError, match=r"several formats: pytorch_model\.bin .torch.; model\.gguf, some-Q4\.gguf .gguf."):
        Checkpoint.open(one_of_each("model.gguf"))


def test_two_unusual_files_of_two_formats_are_ambiguous(one_of_each: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"several formats: x\.pt .torch.; y\.gguf .gguf."):
        Checkpoint.open(one_of_each("x.pt", "y.gguf"))
