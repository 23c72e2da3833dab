"""Behaviour §2, `infer_auto_device_map` and `fallback_allocate`."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict

import pytest
import torch
from contract_models import Bigger, Tied
from model_for_test import ModelForTest
from torch import nn

from bigmodel import infer_auto_device_map, init_empty_weights
from bigmodel.utils import compute_module_sizes
from bigmodel.utils.modeling import fallback_allocate


@pytest.mark.parametrize(
    ("max_memory", "expected"),
    [
        ({0: 236}, {"": 0}),
        ({0: 235}, {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}),
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 200, 1: 172, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 100, 1: 100, 2: 300}, {"linear1": 1, "batchnorm": 2, "linear2": 2}),
        ({0: 164, "cpu": 1000}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
        ({0: 10, 1: 500}, {"": 1}),
        ({0: 10}, {"": "disk"}),
        ({"cpu": 1000}, {"": "cpu"}),
        ({0: 10, "cpu": 1000}, {"": "cpu"}),
    ],
)
def test_the_plain_model(max_memory, expected):
    given = dict(max_memory)
    result = infer_auto_device_map(ModelForTest(), max_memory=max_memory)
    assert isinstance(result, OrderedDict)
    assert result == expected
    assert max_memory == given


def test_strings_as_budgets_and_an_empty_model():
    with init_empty_weights():
        model = ModelForTest()
    assert infer_auto_device_map(model, {0: "0.236KB"}) == {"": 0}


def test_the_map_is_not_shortened_on_demand():
    result = infer_auto_device_map(ModelForTest(), max_memory={0: 1000}, clean_result=False)
    assert result == {"linear1": 0, "batchnorm": 0, "linear2": 0}


@pytest.mark.parametrize("classes", ["ModelForTest", ["ModelForTest"], ("ModelForTest",), {"ModelForTest"}])
def test_blocks_stay_whole(classes):
    result = infer_auto_device_map(Bigger(), max_memory={0: 250, 1: 250, 2: 250}, no_split_module_classes=classes)
    assert result == {"parts.0": 0, "parts.1": 1, "parts.2": 2}


def test_dtype_scales_the_model():
    assert infer_auto_device_map(ModelForTest(), max_memory={0: 122}, dtype=torch.float16) == {"": 0}
    special = {"linear2.weight": torch.float32}
    assert infer_auto_device_map(ModelForTest(), {0: 162}, dtype=torch.float16, special_dtypes=special) == {"": 0}
    assert infer_auto_device_map(ModelForTest(), {0: 161}, dtype=torch.float16, special_dtypes=special) != {"": 0}


def test_tied_modules_go_together():
    model = Tied()
    model.tie_weights()
    for budget in (250, 300, 420, 1000):
        result = infer_auto_device_map(model, max_memory={0: budget, "cpu": 10_000})
        where = {name: device for name, device in result.items() if name in ("embed", "head", "")}
        assert len(set(where.values())) == 1


def test_direct_tensors_are_covered():
    class WithOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("shift", torch.ones(4))
            self.inner = nn.Linear(4, 4)

    outer = nn.ModuleDict({"a": WithOwn(), "b": WithOwn()})
    for budget in (10, 60, 100, 130, 200):
        result = infer_auto_device_map(outer, max_memory={0: budget, "cpu": 10_000})
        for name in outer.state_dict():
            assert any(key == "" or name == key or name.startswith(f"{key}.") for key in result), name


def test_buffers_that_fit_nowhere_are_warned_of():
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            self.register_buffer("table", torch.zeros(400))

    model = nn.Sequential(nn.Linear(4, 4, bias=False), Buffers())
    with pytest.warns(UserWarning, match="Current model requires 1600 bytes of buffer for offloaded layers"):
        infer_auto_device_map(model, max_memory={0: 200, "cpu": 10_000}, no_split_module_classes=["Buffers"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 200, "cpu": 10_000}, ["Buffers"], offload_buffers=True)
        infer_auto_device_map(model, {"cpu": 10_000}, ["Buffers"])


def test_devices_that_got_nothing_are_told(caplog):
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(ModelForTest(), max_memory={0: 5, "cpu": 10_000})
    assert "insufficient memory" in caplog.text
    assert "  - 0: " in caplog.text
    assert "bytes required" in caplog.text


def test_untied_models_that_should_be_tied_are_told(caplog):
    transformers = pytest.importorskip("transformers")
    with init_empty_weights():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8))
    model.lm_head.weight = nn.Parameter(torch.empty(20, 8, device="meta"))
    with caplog.at_level(logging.WARNING):
        infer_auto_device_map(model, {"cpu": "1GB"})
    assert "The model weights are not tied. Please use the `tie_weights` method" in caplog.text


def test_the_largest_part_that_fits_is_found():
    model = ModelForTest()
    sizes = compute_module_sizes(model)
    modules = list(model.named_children())
    name, module, rest = fallback_allocate(modules, sizes, 70)
    assert (name, module) == ("linear1", model.linear1)
    assert [key for key, _ in rest] == ["batchnorm", "linear2"]


@pytest.mark.parametrize("limit", [0, -1, 3])
def test_nothing_fits(limit):
    model = ModelForTest()
    modules = list(model.named_children())
    name, module, rest = fallback_allocate(modules, compute_module_sizes(model), limit)
    assert (name, module) == (None, None)
    assert rest == modules


def test_parents_of_what_was_found_are_expanded():
    model = Bigger()
    sizes = compute_module_sizes(model)
    name, module, rest = fallback_allocate(list(model.named_children()), sizes, 64)
    assert name == "parts.0.linear1"
    assert module is model.parts[0].linear1
    assert [key for key, _ in rest] == ["parts.0.batchnorm", "parts.0.linear2", "parts.1", "parts.2"]
    name, _, rest = fallback_allocate(list(model.named_children()), sizes, 64, ["ModelForTest"])
    assert name is None
