"""Behaviour §2, `set_module_tensor_to_device`."""

from __future__ import annotations

import pytest
import torch
from model_for_test import ModelForTest
from torch import nn

from bigmodel.utils import set_module_tensor_to_device


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "num_batches_tracked"])
@pytest.mark.parametrize("dotted", [False, True])
def test_round_trips(execution_device, name, dotted):
    module = nn.ModuleDict({"inner": nn.BatchNorm1d(3)}) if dotted else nn.BatchNorm1d(3)
    path = f"inner.{name}" if dotted else name
    owner = module["inner"] if dotted else module
    value = getattr(owner, name).detach().clone() + 2
    set_module_tensor_to_device(module, path, execution_device, value=value)
    assert getattr(owner, name).device == execution_device
    set_module_tensor_to_device(module, path, "meta")
    assert getattr(owner, name).device.type == "meta"
    with pytest.raises(ValueError, match=rf"{name} is on the meta device, we need a `value` to put in on cpu"):
        set_module_tensor_to_device(module, path, "cpu")
    set_module_tensor_to_device(module, path, "cpu", value=value)
    set_module_tensor_to_device(module, path, execution_device)
    assert torch.equal(getattr(owner, name).detach().cpu(), value)
    assert (name in owner._parameters) == isinstance(getattr(owner, name), nn.Parameter)


def test_indices_and_names_of_devices(accelerators):
    accelerators(2)
    module = nn.Linear(2, 2)
    for device in (1, "sim:1", torch.device("sim", 1)):
        set_module_tensor_to_device(module, "weight", device, value=torch.ones(2, 2))
        assert module.weight.device == torch.device("sim", 1)


def test_shapes_are_compared():
    module = nn.Linear(2, 3)
    message = r'Trying to set a tensor of shape torch\.Size\(\[3\]\) in "weight" \(which has shape torch\.Size\(\[3, 2\]\)\), this looks'
    with pytest.raises(ValueError, match=message):
        set_module_tensor_to_device(module, "weight", "cpu", value=torch.ones(3))


def test_paths_that_lead_nowhere():
    model = ModelForTest()
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named nothing"):
        set_module_tensor_to_device(model, "linear1.nothing", "cpu")
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named training"):
        set_module_tensor_to_device(model, "linear1.training", "cpu")
    with pytest.raises(AttributeError):
        set_module_tensor_to_device(model, "nowhere.weight", "cpu")
    model.linear1 = None
    with pytest.raises(ValueError, match="has no attribute linear1"):
        set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.ones(4, 3))


def test_the_value_takes_the_tensors_own_dtype():
    module = nn.Linear(2, 2, dtype=torch.float16)
    set_module_tensor_to_device(module, "weight", "cpu", value=torch.ones(2, 2))
    assert module.weight.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_a_dtype_converts_floating_values_only(dtype):
    module = nn.BatchNorm1d(2)
    set_module_tensor_to_device(module, "weight", "cpu", value=torch.ones(2), dtype=dtype)
    assert module.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(module, "num_batches_tracked", "cpu", value=torch.tensor(3), dtype=dtype)
    assert module.num_batches_tracked.dtype == torch.int64
    assert module.num_batches_tracked == 3


def test_nothing_changes_where_nothing_moves():
    module = nn.Linear(2, 2)
    before = module.weight
    set_module_tensor_to_device(module, "weight", "cpu")
    assert module.weight is before
    set_module_tensor_to_device(module, "weight", "cpu", dtype=torch.float16)
    assert module.weight is before


def test_meta_tensors_may_change_their_dtype():
    module = nn.BatchNorm1d(2)
    set_module_tensor_to_device(module, "weight", "meta", dtype=torch.float16)
    assert (module.weight.device.type, module.weight.dtype) == ("meta", torch.float16)
    assert isinstance(module.weight, nn.Parameter)
    set_module_tensor_to_device(module, "num_batches_tracked", "meta", dtype=torch.float16)
    assert module.num_batches_tracked.dtype == torch.int64


def test_a_value_makes_a_new_parameter_of_the_same_kind():
    class Special(nn.Parameter):
        pass

    module = nn.Linear(2, 2)
    module.weight = Special(torch.zeros(2, 2), requires_grad=False)
    module.weight._is_hf_initialized = True
    before = module.weight
    set_module_tensor_to_device(module, "weight", "cpu", value=torch.ones(2, 2))
    assert module.weight is not before
    assert type(module.weight) is Special
    assert module.weight.requires_grad is False
    assert module.weight._is_hf_initialized is True
    buffer = nn.BatchNorm1d(2)
    set_module_tensor_to_device(buffer, "running_mean", "cpu", value=torch.ones(2))
    assert type(buffer.running_mean) is torch.Tensor


def test_no_graph_is_recorded():
    module = nn.Linear(2, 2)
    value = torch.ones(2, 2, requires_grad=True) * 2
    set_module_tensor_to_device(module, "weight", "cpu", value=value)
    assert module.weight.is_leaf
    assert module.weight.requires_grad


def test_ties_are_moved_once(accelerators):
    (device,) = accelerators(1)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    ties = {first.weight.data_ptr(): {}}
    pointer = first.weight.data_ptr()
    set_module_tensor_to_device(first, "weight", 0, tied_params_map=ties)
    assert list(ties[pointer]) in ([0], [device])
    set_module_tensor_to_device(second, "weight", 0, tied_params_map=ties)
    assert second.weight is first.weight
    third = nn.Linear(2, 2, device="meta")
    kept = torch.ones(2, 2)
    ties[kept.data_ptr()] = {}
    set_module_tensor_to_device(third, "weight", 0, value=kept, tied_params_map=ties)
    fourth = nn.Linear(2, 2, device="meta")
    set_module_tensor_to_device(fourth, "weight", 0, value=kept, tied_params_map=ties)
    assert fourth.weight is third.weight


def test_flags_are_accepted(execution_device):
    module = nn.Linear(2, 2)
    assert set_module_tensor_to_device(module, "bias", execution_device, torch.ones(2), None, None, None, True, False) is None
    assert torch.equal(module.bias.detach().cpu(), torch.ones(2))
