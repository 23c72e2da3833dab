"""Behaviour §1: `init_empty_weights` and `init_on_device`."""

from __future__ import annotations

import inspect

import pytest
import torch
from contract_models import Tied
from model_for_test import ModelForTest
from torch import nn

from bigmodel import init_empty_weights, init_on_device
from bigmodel.utils import find_tied_parameters


def test_parameters_are_on_meta_and_buffers_on_cpu():
    with init_empty_weights():
        module = nn.BatchNorm1d(4)
    assert module.weight.is_meta
    assert module.running_mean.device == torch.device("cpu")
    assert torch.equal(module.running_var, torch.ones(4))
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_too_on_demand_with_nothing_patched():
    before = nn.Module.register_parameter, nn.Module.register_buffer
    with init_empty_weights(include_buffers=True):
        assert (nn.Module.register_parameter, nn.Module.register_buffer) == before
        module = nn.BatchNorm1d(4)
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert nn.BatchNorm1d(4).running_mean.device.type == "cpu"


@pytest.mark.parametrize("variable", ["BIGMODEL_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS"])
def test_the_environment_decides_where_the_argument_does_not(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with init_empty_weights():
        assert nn.BatchNorm1d(4).running_mean.is_meta
    with init_empty_weights(include_buffers=False):
        assert not nn.BatchNorm1d(4).running_mean.is_meta


def test_own_variable_is_read_before_its_alias(monkeypatch):
    monkeypatch.setenv("BIGMODEL_INIT_INCLUDE_BUFFERS", "0")
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert not nn.BatchNorm1d(4).running_mean.is_meta


def test_a_thousand_huge_layers_take_no_memory():
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == 1000 * 10_000 * 10_001


@pytest.mark.parametrize("include_buffers", [False, True])
def test_ties_made_inside_are_kept(include_buffers):
    with init_empty_weights(include_buffers=include_buffers):
        model = Tied()
        model.tie_weights()
    assert model.head.weight is model.embed.weight
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]


def test_everything_is_restored_after_an_error():
    with pytest.raises(KeyError, match="inside"), init_empty_weights():
        raise KeyError("inside")
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_class_attributes_and_absent_parameters_are_kept():
    class Special(nn.Parameter):
        pass

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.special = Special(torch.ones(2))
            self.register_parameter("absent", None)
            marked = nn.Parameter(torch.ones(3))
            marked._is_hf_initialized = True
            self.marked = marked

    with init_empty_weights():
        module = Module()
    assert module.frozen.is_meta
    assert not module.frozen.requires_grad
    assert type(module.special) is Special
    assert module.absent is None
    assert module.marked.is_meta
    assert module.marked._is_hf_initialized is True


def test_on_another_device(execution_device):
    with init_on_device(execution_device):
        module = nn.BatchNorm1d(4)
    assert module.weight.device == execution_device
    assert module.running_mean.device.type == "cpu"
    with init_on_device(device=execution_device, include_buffers=True):
        module = nn.BatchNorm1d(4)
    assert module.running_mean.device == execution_device


def test_methods_of_modules_are_never_replaced():
    register = nn.Module.register_parameter
    source = inspect.getsource(register)
    with init_empty_weights():
        assert nn.Module.register_parameter is register
        ModelForTest()
    assert inspect.getsource(nn.Module.register_parameter) == source
