"""Which files of a folder are the checkpoint, and what is refused before anything is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.loading import Checkpoint

A, B = {"a": torch.ones(2)}, {"b": torch.zeros(3)}


def index(folder: Path, weight_map: dict[str, str], name: str = "model.safetensors.index.json", bare: bool = False) -> None:
    (folder / name).write_text(json.dumps(weight_map if bare else {"metadata": {}, "weight_map": weight_map}))


def shards(folder: Path) -> dict[str, str]:
    save_file(A, folder / "model-00001-of-00002.safetensors")
    save_file(B, folder / "model-00002-of-00002.safetensors")
    return {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize("bare", [False, True])
def test_an_index_over_its_shards(tmp_path: Path, bare: bool) -> None:
    index(tmp_path, shards(tmp_path), bare=bare)
    for where in (tmp_path, tmp_path / "model.safetensors.index.json", str(tmp_path)):
        checkpoint = Checkpoint.open(where)
        assert {name: entry.file.name for name, entry in checkpoint.entries.items()} == {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }


def test_shards_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path)
    assert set(Checkpoint.open(tmp_path).entries) == {"a", "b"}
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"shards \[1\] are missing"):
        Checkpoint.open(tmp_path)


def test_an_index_beats_a_stray_file_and_safetensors_beats_bin(tmp_path: Path) -> None:
    index(tmp_path, shards(tmp_path))
    save_file({"stray": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert set(Checkpoint.open(tmp_path).entries) == {"a", "b"}


def test_the_usual_name_wins_over_others(tmp_path: Path) -> None:
    save_file(A, tmp_path / "model.safetensors")
    save_file(B, tmp_path / "model.fp16.safetensors")
    assert set(Checkpoint.open(tmp_path).entries) == {"a"}


def test_several_that_could_be_meant_are_listed(tmp_path: Path) -> None:
    save_file(A, tmp_path / "x.safetensors")
    assert set(Checkpoint.open(tmp_path).entries) == {"a"}
    save_file(B, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors, y\.safetensors"):
        Checkpoint.open(tmp_path)


def test_two_unusual_indexes_are_ambiguous(tmp_path: Path) -> None:
    names = shards(tmp_path)
    index(tmp_path, names, "one.safetensors.index.json")
    index(tmp_path, names, "two.safetensors.index.json")
    with pytest.raises(ValueError, match=r"containing more than one `\.index\.json` file|contains more than one `\.index\.json` file"):
        Checkpoint.open(tmp_path)


def test_torch_files_sharded_and_alone(tmp_path: Path) -> None:
    torch.save(A, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(B, tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save({"lr": torch.ones(1)}, tmp_path / "optimizer.pt")
    index(tmp_path, {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}, "pytorch_model.bin.index.json")
    checkpoint = Checkpoint.open(tmp_path)
    assert (set(checkpoint.entries), checkpoint.format) == ({"a", "b"}, "torch")


def test_an_index_of_any_name_over_files_of_any_name(tmp_path: Path) -> None:
    torch.save(A, tmp_path / "first.bin")
    torch.save(B, tmp_path / "second.bin")
    index(tmp_path, {"a": "first.bin", "b": "second.bin"}, "weights.index.json")
    assert set(Checkpoint.open(tmp_path).entries) == {"a", "b"}


def test_a_folder_without_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a folder containing a `\.index\.json` file or a"):
        Checkpoint.open(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not the name of a checkpoint file"):
        Checkpoint.open(tmp_path / "notes.txt")


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd.safetensors", "a/../../b.safetensors"])
def test_an_index_must_not_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    save_file(A, tmp_path / "elsewhere.safetensors")
    (tmp_path / "in").mkdir()
    index(tmp_path / "in", {"a": name})
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint.open(tmp_path / "in")


@pytest.mark.parametrize("name", ["m" * 300 + ".safetensors", "\u00e9" * 150 + ".safetensors"])
def test_an_index_with_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="no file system has such names"):
        Checkpoint.open(tmp_path)


def test_an_index_that_names_a_missing_file_or_tensor(tmp_path: Path) -> None:
    names = shards(tmp_path)
    index(tmp_path, names | {"c": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"'c' is in model-00002-of-00002\.safetensors, but it is not"):
        Checkpoint.open(tmp_path)
    index(tmp_path, names | {"c": "model-00003-of-00003.safetensors"})
    with pytest.raises(CheckpointNotFoundError, match=r"model-00003-of-00003\.safetensors.*not there"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": 3}', "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_damaged_index(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused_unless_the_index_decides(tmp_path: Path) -> None:
    names = shards(tmp_path)
    save_file(B | {"a": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in both"):
        Checkpoint.open(tmp_path)
    index(tmp_path, names)
    assert Checkpoint.open(tmp_path).entries["a"].file.name == "model-00001-of-00002.safetensors"


def test_the_truncated_one_of_many_shards_is_named(tmp_path: Path) -> None:
    index(tmp_path, shards(tmp_path))
    file = tmp_path / "model-00002-of-00002.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 4)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00002\.safetensors: truncated: expected {size} bytes, found {size - 4}"):
        Checkpoint.open(tmp_path)


def test_a_change_after_opening_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(A, file)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check_unchanged()
    os.utime(file, ns=(0, 0))
    with pytest.raises(CheckpointError, match="was written to"):
        checkpoint.check_unchanged()
    os.truncate(file, 10)
    with pytest.raises(CheckpointError, match="has 10 now"):
        checkpoint.check_unchanged()
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors"):
        checkpoint.check_unchanged()


def test_a_link_to_nothing_is_called_that(saved: Path, tmp_path: Path) -> None:
    gone = tmp_path / "blobs" / "0123"
    single, shards, index, bare = (tmp_path / name for name in ("single", "shards", "index", "bare"))
    for folder in (single, shards, index):
        folder.mkdir()
    (single / "model.safetensors").symlink_to(gone)
    for number in (1, 2):
        (shards / f"model-0000{number}-of-00002.safetensors").symlink_to(saved / "model.safetensors" if number == 1 else gone)
    (index / "a.safetensors").symlink_to(gone)
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    bare.symlink_to(gone)
    for where in (single, single / "model.safetensors", shards, index, bare):
        with pytest.raises(CheckpointNotFoundError, match="the link points to nothing") as caught:
            Checkpoint.open(where)
        assert str(gone) in str(caught.value)
        assert "huggingface_hub" not in str(caught.value)
