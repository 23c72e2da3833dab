"""Dumps of headers: the three forms, and everything that is no such dump, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.cli.main import main
from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.header_dump import read_dump, specs_in
from bigmodel.protocols import TensorSpec

SPECS = {
    "layers.0.weight": TensorSpec((4, 3), torch.bfloat16),
    "layers.1.weight": TensorSpec((4, 3), torch.bfloat16),
    "norm": TensorSpec((4,), torch.float32),
    "steps": TensorSpec((), torch.int64),
}


def test_plain_dumps_with_either_spelling_of_dtypes() -> None:
    for names in (("bfloat16", "float32", "int64"), ("BF16", "F32", "I64"), ("torch.bfloat16", "torch.float32", "torch.int64")):
        wide, single, whole = names
        dump = {
            "layers.0.weight": {"dtype": wide, "shape": [4, 3]},
            "layers.1.weight": {"dtype": wide, "shape": [4, 3]},
            "norm": {"dtype": single, "shape": [4]},
            "steps": {"dtype": whole, "shape": []},
        }
        assert specs_in(dump) == SPECS
        assert list(specs_in(dump)) == list(SPECS)


def test_the_header_of_a_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in SPECS.items()}, file, metadata={"format": "pt"})
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert "__metadata__" in header
    assert specs_in(header) == SPECS
    header["norm"]["data_offsets"][1] += 4
    with pytest.raises(CheckpointError, match=r"'norm' of shape \[4\] and dtype F32 needs 16 bytes, not 20"):
        specs_in(header)


def test_what_inspect_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in SPECS.items()}, file)
    with pytest.raises(SystemExit):
        main(["inspect", str(file), "--json"])
    (tmp_path / "dump.json").write_text(capsys.readouterr().out)
    dump = read_dump(tmp_path / "dump.json")
    assert specs_in(dump) == SPECS
    dump["tensors"]["norm"]["nbytes"] = 3
    with pytest.raises(CheckpointError, match=r"'norm' .* needs 16 bytes, not 3"):
        specs_in(dump)


def test_a_tensor_may_be_called_tensors() -> None:
    assert specs_in({"tensors": {"dtype": "F32", "shape": [2]}}) == {"tensors": TensorSpec((2,), torch.float32)}


@pytest.mark.parametrize(
    ("dump", "said"),
    [
        ([], "is not one"),
        ("text", "is not one"),
        ({}, "holds no tensors"),
        ({"__metadata__": {}}, "holds no tensors"),
        ({"tensors": []}, "is not one"),
        ({"a": 3}, "'a' lacks a 'dtype' and a 'shape'"),
        ({"a": torch.ones(3, 3)}, "'a' lacks a 'dtype' and a 'shape'"),
        ({"model_type": "llama", "hidden_size": 8}, "dump.json is a configuration, and no header dump"),
        ({"a": {"dtype": "F32"}}, "'a' lacks"),
        ({"a": {"dtype": "F32", "shape": 3}}, "'a' lacks"),
        ({"a": {"dtype": "F32", "shape": [[1]]}}, "'a' lacks"),
        ({"a": {"dtype": "F31", "shape": [3]}}, "'a' has the unknown dtype 'F31'"),
        ({"a": {"dtype": 5, "shape": [3]}}, "'a' has the unknown dtype '5'"),
        ({"a": {"dtype": "F32", "shape": [-3]}}, r"'a' has an impossible shape \[-3\]"),
        ({"a": {"dtype": "F32", "shape": [1.5]}}, r"'a' has an impossible shape \[1.5\]"),
        ({"a": {"dtype": "F32", "shape": "12"}}, "'a' has an impossible shape 12"),
        ({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40]}}, "'a' has an impossible shape"),
        ({"a": {"dtype": "F32", "shape": [1] * 65}}, "'a' has an impossible shape"),
        ({"": {"dtype": "F32", "shape": [3]}}, "'' is no name"),
        ({"a..b": {"dtype": "F32", "shape": [3]}}, r"'a\.\.b' is no name"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [4]}}, "'a' has impossible 'data_offsets'"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [-12, 0]}}, "'a' of shape"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": "ab"}}, "'a' has impossible 'data_offsets'"),
        ({"format": "safetensors", "tensors": {"a": {"dtype": "F32", "shape": [3]}}}, "'a' has impossible 'data_offsets' or 'nbytes'"),
    ],
)
def test_nothing_is_believed_unchecked(dump: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        specs_in(dump, "dump.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\ud800".encode("utf-16", "surrogatepass").decode("latin-1")])
def test_files_that_are_no_dump_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "headers.json"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=r"headers\.json: cannot be read as a header dump"):
        read_dump(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere\.json"):
        read_dump(tmp_path / "nowhere.json")
