"""Offload folders: raw files and indexes, read back as they were; names cannot lead out; nothing of another model."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    check_owner,
    extract_submodules_state_dict,
    fill_folder,
    folder_owner,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_folder,
    offload_state_dict,
    offload_weight,
    save_offload_index,
    write_owner,
)

TENSORS = {
    "f32": torch.randn(2, 3),
    "f16": torch.randn(2, 3).half(),
    "bf16": torch.randn(2, 3).bfloat16(),
    "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    "i64": torch.arange(4),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "turned": torch.randn(3, 4).t(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_weight_round_trips(tmp_path: Path, name: str) -> None:
    value = TENSORS[name]
    index = offload_weight(value, name, tmp_path, {})
    assert index == {name: {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}}
    found = load_offloaded_weight(tmp_path / f"{name}.dat", index[name])
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found.float(), value.float())
    assert offload_weight(value, name, tmp_path) is None


def test_a_short_or_missing_file(tmp_path: Path) -> None:
    index = offload_weight(torch.ones(4), "a", tmp_path, {})
    assert index is not None
    (tmp_path / "a.dat").write_bytes(bytes(15))
    with pytest.raises(CheckpointError, match=r"a\.dat: expected 16 bytes, found 15"):
        load_offloaded_weight(tmp_path / "a.dat", index["a"])
    with pytest.raises(FileNotFoundError, match=r"b\.dat"):
        load_offloaded_weight(tmp_path / "b.dat", index["a"])


def test_a_state_dict_and_its_loader(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "new", TENSORS)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(TENSORS)
    assert len(loader) == len(TENSORS)
    for weights in (loader, pickle.loads(pickle.dumps(loader))):
        assert all(torch.equal(weights[name].float(), TENSORS[name].float()) for name in TENSORS)
    with pytest.raises(KeyError):
        loader["nothing"]
    assert "nothing" not in loader
    assert not [file for file in (tmp_path / "new").iterdir() if file.suffix == ".tmp"]


def test_the_index_is_merged_and_new_entries_win(tmp_path: Path) -> None:
    save_offload_index({"a": {"dtype": "x"}, "b": {}}, tmp_path)
    save_offload_index({"a": {"dtype": "y"}}, tmp_path)
    save_offload_index({}, tmp_path)
    save_offload_index(None, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == {"a": {"dtype": "y"}, "b": {}}


def test_memory_comes_before_disk(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.ones(1)})
    loader = OffloadedWeightsLoader({"a": torch.ones(1)}, tmp_path)
    assert (list(loader), loader["a"].item(), loader["b"].item()) == (["a", "b"], 1, 1)
    with pytest.raises(ValueError, match="Nothing to load"):
        OffloadedWeightsLoader()
    with pytest.raises(FileNotFoundError):
        OffloadedWeightsLoader(save_folder=tmp_path / "nowhere")


def test_an_index_into_checkpoints(tmp_path: Path) -> None:
    value = torch.randn(3, 4)
    save_file({"x": value}, tmp_path / "x.safetensors")
    torch.save({"x": value}, tmp_path / "x.bin")
    index = {
        "a": {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": "x", "dtype": "float16"},
        "x": {"safetensors_file": str(tmp_path / "x.safetensors")},
        "b": {"torch_file": str(tmp_path / "x.bin"), "weight_name": "x", "dtype": "bfloat16"},
        "c": {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": "y"},
        "d": {"dtype": "float32", "shape": [1]},
    }
    loader = OffloadedWeightsLoader(index=index)
    assert torch.equal(loader["a"], value.half())
    assert torch.equal(loader["x"], value)
    assert torch.equal(loader["b"], value.bfloat16())
    with pytest.raises(CheckpointError, match="holds 'y', but it does not"):
        loader["c"]
    with pytest.raises(CheckpointError, match="save_folder"):
        loader["d"]


def test_relative_files_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate(("ck", "off", "outside", "off/inside")):
        Path(folder).mkdir()
        save_file({"x": torch.full((2,), float(number))}, f"{folder}/x.safetensors")
    given = {"x": {"safetensors_file": "ck/x.safetensors"}, "up": {"safetensors_file": "off/../ck/x.safetensors", "weight_name": "x"}}
    for loader in (OffloadedWeightsLoader(index=given, save_folder="off"), OffloadedWeightsLoader(index=given)):
        assert [loader["x"].tolist(), loader["up"].tolist()] == [[0, 0], [0, 0]]
    save_offload_index(
        {
            "beside": {"safetensors_file": "x.safetensors", "weight_name": "x"},
            "inside": {"safetensors_file": "inside/x.safetensors", "weight_name": "x"},
            "where it ran": {"safetensors_file": "ck/x.safetensors", "weight_name": "x"},
            "out": {"safetensors_file": "../outside/x.safetensors", "weight_name": "x"},
            "none": {"safetensors_file": "none.safetensors", "weight_name": "x"},
        },
        "off",
    )
    loader = OffloadedWeightsLoader(save_folder="off")
    assert [loader[name][0].item() for name in ("beside", "inside", "where it ran")] == [1, 3, 0]
    with pytest.raises(CheckpointError, match=r"off/index\.json: names the file '\.\./outside/x\.safetensors' outside its folder"):
        loader["out"]
    with pytest.raises(FileNotFoundError, match=r"off/none\.safetensors"):
        loader["none"]


@pytest.mark.parametrize("name", ["../a", "a/b", "..", "", ".hidden", "a\\b", "a\0b"])
def test_names_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="lead out of the folder"):
        offload_weight(torch.ones(1), name, tmp_path)
    loader = OffloadedWeightsLoader(save_folder=tmp_path, index={name: {"dtype": "float32", "shape": [1]}})
    with pytest.raises(CheckpointError, match="lead out of the folder"):
        loader[name]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', "[" * 100_000])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_a_prefixed_view() -> None:
    view = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert (view["x"], list(view), len(view)) == (1, ["a.x", "a.y"], 2)
    assert "y" in view
    assert "b.x" not in view


def test_items_of_submodules() -> None:
    state = {"a.1.w": 1, "a.10.w": 2, "b": 3, "ba": 4}
    assert extract_submodules_state_dict(state, ["a.1", "b"]) == {"a.1.w": 1, "b": 3}
    assert extract_submodules_state_dict(state, [""]) == state


def test_weights_are_brought_back_into_a_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    index: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        offload_weight(value, name, tmp_path, index)
    model.to("meta")
    load_offloaded_weights(model, index, tmp_path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    load_offloaded_weights(model, None, tmp_path)
    load_offloaded_weights(model, {}, tmp_path)


def test_a_folder_knows_whose_it_is(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 4)
    assert not check_owner(tmp_path, model, "here")
    save_offload_index({"weight": {"dtype": "float32", "shape": [2, 3]}}, tmp_path)
    assert check_owner(tmp_path, model)
    with pytest.raises(CheckpointError, match="belongs to another model: weight"):
        check_owner(tmp_path, other)
    write_owner(tmp_path, model, "here")
    assert check_owner(tmp_path, model, "here")
    assert check_owner(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"from here; this one is Linear\)"):
        check_owner(tmp_path, other)
    for stranger, source in ((other, "here"), (model, "there"), (nn.Bilinear(1, 3, 2), "here")):
        with pytest.raises(CheckpointError, match="belongs to another model"):
            check_owner(tmp_path, stranger, source)


def test_a_folder_that_cannot_be_written_holds_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"file: it is a file"):
        offload_state_dict(tmp_path / "file", TENSORS)
    folder = tmp_path / "new" / "deep"
    write = offload_folder.write_atomically
    for last in ("i64.dat", "index.json"):

        def full(file: Path, data: bytes | memoryview, last: str = last) -> None:
            if file.name == last:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(file, data)

        monkeypatch.setattr(offload_folder, "write_atomically", full)
        with pytest.raises(CheckpointError, match=r"new/deep: .*No space left") as caught:
            offload_state_dict(folder, TENSORS)
        assert isinstance(caught.value.__cause__, OSError)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_note_that_cannot_be_written_takes_the_weights_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_owner, "write_atomically", full)
    model = nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"offload: .*No space left"):
        fill_folder(tmp_path / "offload", model, model.state_dict())
    assert list(tmp_path.iterdir()) == []
