"""Behaviour §3: the offload folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_round_trip(tmp_path, dtype, shape):
    tensor = (torch.rand(shape) * 3).to(dtype)
    index = {}
    assert offload_weight(tensor, "a.weight", tmp_path, index) is index
    assert index == {"a.weight": {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}}
    file = tmp_path / "a.weight.dat"
    assert file.stat().st_size >= tensor.nbytes
    found = load_offloaded_weight(file, index["a.weight"])
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8) if shape else found.float(), tensor.view(torch.uint8) if shape else tensor.float())


def test_without_an_index_none_comes_back(tmp_path):
    assert offload_weight(torch.ones(2), "a", str(tmp_path)) is None
    assert torch.equal(load_offloaded_weight(str(tmp_path / "a.dat"), {"dtype": "float32", "shape": [2]}), torch.ones(2))


def test_any_layout_is_written_in_rows(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3).t()
    index = offload_weight(tensor, "a", tmp_path, {})
    assert torch.equal(load_offloaded_weight(tmp_path / "a.dat", index["a"]), tensor)
    assert (tmp_path / "a.dat").read_bytes() == tensor.contiguous().numpy().tobytes()


def test_what_is_loaded_is_a_copy(tmp_path):
    index = offload_weight(torch.ones(2), "a", tmp_path, {})
    load_offloaded_weight(tmp_path / "a.dat", index["a"]).zero_()
    assert torch.equal(load_offloaded_weight(tmp_path / "a.dat", index["a"]), torch.ones(2))


def test_indexes_are_merged_and_new_entries_win(tmp_path):
    for nothing in (None, {}):
        save_offload_index(nothing, tmp_path)
    assert os.listdir(tmp_path) == []
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"a": {"dtype": "int8", "shape": [1]}, "b": {"dtype": "int8", "shape": []}}, str(tmp_path))
    text = (tmp_path / "index.json").read_text()
    assert json.loads(text) == {"a": {"dtype": "int8", "shape": [1]}, "b": {"dtype": "int8", "shape": []}}
    assert '\n  "a"' in text


def test_a_state_dict_is_written_with_its_index(tmp_path):
    state = {"a.weight": torch.ones(2, 2), "a.bias": torch.tensor(3)}
    assert offload_state_dict(tmp_path / "new" / "folder", state) is None
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["a.bias.dat", "a.weight.dat", "index.json"]
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new" / "folder")
    assert all(torch.equal(loader[name], value) for name, value in state.items())


def test_prefixes_are_added():
    data = {"a.x": 1, "a.y": 2, "b.x": 3}
    view = PrefixedDataset(data, "a.")
    assert isinstance(view, Mapping)
    assert (view["x"], view["y"]) == (1, 2)
    assert list(view) == ["a.x", "a.y"]
    assert len(view) == 2
    assert "x" in view
    assert "z" not in view
    assert view.get("z") is None
    assert view.dataset is data
    assert view.prefix == "a."
    with pytest.raises(KeyError):
        view["z"]


def test_nothing_to_load_from():
    with pytest.raises(ValueError, match="`state_dict`"):
        OffloadedWeightsLoader()


def test_a_folder_without_an_index(tmp_path):
    with pytest.raises(FileNotFoundError):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_lookups_in_memory_then_in_the_folder(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    state = {"c": torch.zeros(1), "a": torch.zeros(2)}
    loader = OffloadedWeightsLoader(state_dict=state, save_folder=tmp_path)
    assert isinstance(loader, Mapping)
    assert list(loader) == ["c", "a", "b"]
    assert len(loader) == 3
    assert list(loader.all_keys) == ["c", "a", "b"]
    assert loader["a"] is state["a"]
    assert torch.equal(loader["b"], torch.ones(3))
    assert (loader.state_dict, loader.save_folder, loader.device) == (state, tmp_path, None)
    assert loader.index == {"a": {"dtype": "float32", "shape": [2]}, "b": {"dtype": "float32", "shape": [3]}}
    with pytest.raises(KeyError):
        loader["d"]
    assert list(OffloadedWeightsLoader({"x": torch.ones(1)})) == ["x"]


def test_entries_that_point_into_safetensors(tmp_path, execution_device):
    save_file({"in.file": torch.arange(4.0), "same": torch.ones(2)}, tmp_path / "m.safetensors")
    index = {
        "renamed": {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "in.file", "dtype": "float16"},
        "same": {"safetensors_file": str(tmp_path / "m.safetensors")},
    }
    loader = OffloadedWeightsLoader(index=index, device=execution_device)
    assert list(loader) == ["renamed", "same"]
    assert loader["renamed"].dtype == torch.float16
    assert loader["renamed"].device == execution_device
    assert torch.equal(loader["renamed"].cpu(), torch.arange(4.0).half())
    assert torch.equal(loader["same"].cpu(), torch.ones(2))
    assert OffloadedWeightsLoader(index=index)["same"].device.type == "cpu"


def test_a_relative_file_is_looked_for_where_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("checkpoint")
    save_file({"weight": torch.arange(2.0)}, "checkpoint/m.safetensors")
    index = {"weight": {"safetensors_file": "checkpoint/m.safetensors", "weight_name": "weight", "dtype": "float32"}}
    assert torch.equal(OffloadedWeightsLoader(index=index, save_folder="off")["weight"], torch.arange(2.0))


def test_modules_are_extracted_by_whole_names():
    state = {"a.1": 1, "a.1.w": 2, "a.10.w": 3, "b.w": 4}
    assert extract_submodules_state_dict(state, ["a.1"]) == {"a.1": 1, "a.1.w": 2}
    assert extract_submodules_state_dict(state, ["a"]) == {"a.1": 1, "a.1.w": 2, "a.10.w": 3}
    assert extract_submodules_state_dict(state, ["b", "a.10"]) == {"a.10.w": 3, "b.w": 4}
    assert extract_submodules_state_dict(state, []) == {}
    assert extract_submodules_state_dict(state, [""]) == state  # the whole model, so that {"": "disk"} offloads it
