"""Behaviour §1: `attach_layerwise_casting_hooks`."""

from __future__ import annotations

import pytest
import torch
from contract_models import ready
from torch import nn

from bigmodel.big_modeling import attach_layerwise_casting_hooks
from bigmodel.hooks import LayerwiseCastingHook, SequentialHook, remove_hook_from_submodules
from bigmodel.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


def dtypes(model):
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn])
def test_linear_layers_rest_in_the_storage_dtype(storage, execution_device):
    model, x, expected = ready()
    model.to(execution_device)
    attach_layerwise_casting_hooks(
        model, storage_dtype=storage, compute_dtype=torch.float32, skip_modules_pattern=["batchnorm"], skip_modules_classes=()
    )
    resting = {
        "linear1.weight": storage,
        "linear1.bias": storage,
        "batchnorm.weight": torch.float32,
        "batchnorm.bias": torch.float32,
        "linear2.weight": storage,
        "linear2.bias": storage,
    }
    assert dtypes(model) == resting
    seen = []
    model.linear1.register_forward_hook(lambda module, arguments, output: seen.append((module.weight.dtype, output.dtype)))
    with torch.no_grad():
        output = model(x.to(execution_device))
    # The module hook of torch runs after the wrapped forward, when the weight rests again.
    assert seen == [(storage, torch.float32)]
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.cpu(), expected, atol=0.5, rtol=0.5)
    assert dtypes(model) == resting


def test_returns_none_and_takes_positional_arguments():
    model, _, _ = ready()
    assert attach_layerwise_casting_hooks(model, torch.float16, torch.float32, ("linear1",), (nn.BatchNorm1d,), False) is None
    assert model.linear1.weight.dtype == torch.float32
    assert model.linear2.weight.dtype == torch.float16


def test_patterns_are_searched_in_dotted_names():
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"head": nn.Linear(2, 2)}), "head": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, skip_modules_pattern=["^head", "er.he"])
    assert model["encoder"]["head"].weight.dtype == torch.float32
    assert model["head"].weight.dtype == torch.float32
    assert model["body"].weight.dtype == torch.float16


def test_a_pattern_may_be_one_string():
    model, _, _ = ready()
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, skip_modules_pattern="linear1")
    assert model.linear1.weight.dtype == torch.float32
    assert model.linear2.weight.dtype == torch.float16


def test_skipped_classes_are_left_alone_with_all_below():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    attach_layerwise_casting_hooks(model[0], torch.float16, torch.float32, skip_modules_classes=(nn.Sequential,))
    assert model[0][0].weight.dtype == torch.float32


def test_supported_layers():
    assert set(SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING) == {
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.Linear,
    }
    for layer in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING:
        module = layer(2, 2) if layer is nn.Linear else layer(2, 2, 1)
        attach_layerwise_casting_hooks(module, torch.float16, torch.float32)
        assert module.weight.dtype == torch.float16
        assert isinstance(module._hf_hook, LayerwiseCastingHook)


def test_hooks_are_appended_and_come_off():
    model = nn.Linear(2, 2)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32)
    assert isinstance(model._hf_hook, SequentialHook)
    assert [type(hook) for hook in model._hf_hook.hooks] == [LayerwiseCastingHook, LayerwiseCastingHook]
    remove_hook_from_submodules(model)
    assert not hasattr(model, "_hf_hook")
    assert LayerwiseCastingHook._is_stateful is False
