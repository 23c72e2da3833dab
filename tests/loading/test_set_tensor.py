"""set_module_tensor_to_device and load_state_dict, as scripts know them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import load_state_dict, set_module_tensor_to_device


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"norm": nn.BatchNorm1d(4), "linear": nn.Linear(3, 4)})


@pytest.mark.parametrize("name", ["linear.weight", "norm.running_mean"])
def test_to_meta_and_back(model: nn.Module, name: str) -> None:
    before = model.state_dict()[name].clone()
    set_module_tensor_to_device(model, name, "meta")
    assert model.state_dict()[name].device.type == "meta"
    with pytest.raises(ValueError, match="is on the meta device, we need a `value` to put in on cpu"):
        set_module_tensor_to_device(model, name, "cpu")
    set_module_tensor_to_device(model, name, "cpu", value=before)
    assert torch.equal(model.state_dict()[name], before)


def test_through_an_accelerator(model: nn.Module, accelerators: Callable[..., list[torch.device]]) -> None:
    (device,) = accelerators(1)
    before = model["linear"].weight.detach().clone()
    set_module_tensor_to_device(model, "linear.weight", 0)
    assert model["linear"].weight.device == device
    set_module_tensor_to_device(model["linear"], "weight", "cpu")
    assert torch.equal(model["linear"].weight, before)


def test_dtypes(model: nn.Module) -> None:
    weight = model["linear"].weight
    set_module_tensor_to_device(model, "linear.weight", "cpu", dtype=torch.float16)
    assert model["linear"].weight is weight
    set_module_tensor_to_device(model, "linear.weight", "cpu", value=weight.detach().double())
    assert model["linear"].weight.dtype == torch.float32
    assert model["linear"].weight is not weight
    set_module_tensor_to_device(model, "linear.weight", "cpu", value=weight.detach(), dtype="float16")
    assert model["linear"].weight.dtype == torch.float16
    set_module_tensor_to_device(model, "norm.num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16)
    assert model["norm"].num_batches_tracked.dtype == torch.int64
    set_module_tensor_to_device(model, "linear.weight", "meta", dtype=torch.float32)
    assert (model["linear"].weight.dtype, model["linear"].weight.device.type) == (torch.float32, "meta")


def test_what_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named missing"):
        set_module_tensor_to_device(model, "linear.missing", "cpu")
    with pytest.raises(AttributeError):
        set_module_tensor_to_device(model, "nowhere.weight", "cpu")
    with pytest.raises(ValueError, match=r'Trying to set a tensor of shape .* in "linear.weight" \(which has shape .*this looks incorrect'):
        set_module_tensor_to_device(model, "linear.weight", "cpu", value=torch.ones(1))


def test_flags_of_the_parameter_are_kept(model: nn.Module) -> None:
    model["linear"].weight.requires_grad_(False)
    model["linear"].weight._is_hf_initialized = True
    set_module_tensor_to_device(model, "linear.weight", "cpu", value=torch.ones(4, 3))
    assert model["linear"].weight._is_hf_initialized
    assert not model["linear"].weight.requires_grad
    assert type(model["linear"].weight) is nn.Parameter


def test_tied_pointers_are_moved_once() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    tied: dict[int, dict[object, torch.Tensor]] = {first.weight.data_ptr(): {}}
    value = first.weight.detach()
    set_module_tensor_to_device(first, "weight", "cpu", value=value, tied_params_map=tied)
    set_module_tensor_to_device(second, "weight", "cpu", value=value, tied_params_map=tied)
    assert second.weight is first.weight


def test_a_state_dict_is_private_and_equal(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.tensor(2), "c": torch.randn(5).bfloat16()}
    save_file(state, tmp_path / "x.safetensors", metadata={"format": "pt"})
    torch.save(state, tmp_path / "x.bin")
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("x.safetensors", "x.bin", "old.bin"):
        found = load_state_dict(tmp_path / name)
        assert set(found) == set(state)
        assert all(torch.equal(found[key], state[key]) for key in state)


def test_a_state_dict_by_device_map(tmp_path: Path, accelerators: Callable[..., list[torch.device]]) -> None:
    (device,) = accelerators(1)
    save_file({"a.w": torch.ones(2), "ab.w": torch.ones(2), "c": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    for device_map, on_device in (({"a": 0, "ab": "disk"}, {"a.w"}), ({"": "disk"}, set()), ({"": 0, "a": "disk"}, {"ab.w", "c"})):
        found = load_state_dict(tmp_path / "x.safetensors", device_map)
        assert {name for name, value in found.items() if value.device == device} == on_device
        assert all(torch.equal(value.cpu(), torch.ones_like(value, device="cpu")) for value in found.values())


def test_frameworks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1)}, file)
    assert load_state_dict(file)["a"] == 1
    assert "metadata" in caplog.text
    for framework, error in (("tf", ValueError), ("flax", ValueError), ("abacus", OSError)):
        save_file({"a": torch.ones(1)}, file, metadata={"format": framework})
        with pytest.raises(error, match=framework):
            load_state_dict(file)
    file.write_bytes(b"1234")
    with pytest.raises(CheckpointError):
        load_state_dict(file)
