"""Device maps made short, and checked against a model."""

from __future__ import annotations

import pytest
import torch
from model_for_test import ModelForTest
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.planning import check_device_map, clean_device_map


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ({"a": 0, "b": 0, "c": 0}, {"": 0}),
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}),
        ({"a": 0}, {"a": 0}),
        ({"a.x": 0}, {"a.x": 0}),
        ({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "c": 1}, {"a": 0, "b": 1, "c": 1}),
        (
            {"a.b.c": 0, "a.b.d": 0, "a.e": 0, "a.f.g": 1, "a.f.h": 1, "ab.x": 2, "ab.y": 2},
            {"a.b": 0, "a.e": 0, "a.f": 1, "ab": 2},
        ),
        ({"layers.1": 0, "layers.10": 1, "layers.11": 1}, {"layers.1": 0, "layers.10": 1, "layers.11": 1}),
    ],
)
def test_entries_that_agree_are_joined(given, cleaned):
    assert clean_device_map(given) == cleaned
    assert given == cleaned


def test_exceptions_to_an_entry_stay():
    given = {"": "cpu", "a.x": 0, "a.y": 0}
    assert clean_device_map(dict(given)) == given


def test_order_of_the_map_is_kept():
    assert list(clean_device_map({"b.x": 1, "a.x": 0, "b.y": 1, "a.y": 0})) == ["b", "a"]


def test_only_below_a_module_on_demand():
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 0}, module_name="a") == {"a": 0, "b.x": 0, "b.y": 0}


def test_a_map_that_leaves_tensors_out_is_refused():
    model = ModelForTest()
    with pytest.raises(ValueError, match=r"does not give any device for the following parameters: linear2.weight, linear2.bias"):
        check_device_map(model, {"linear1": 0, "batchnorm": 1})
    check_device_map(model, {"linear1": 0, "batchnorm": 1, "linear2": 1})
    check_device_map(model, {"": 0})


def test_a_map_that_covers_nothing_is_refused():
    with pytest.raises(PlanError, match=r"linear1.weight.*num_batches_tracked"):
        check_device_map(ModelForTest(), {})


def test_persistent_buffers_need_a_device():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("mean", torch.zeros(2))
    with pytest.raises(ValueError, match="mean"):
        check_device_map(model, {"0": "cpu"})
    check_device_map(model, {"0": "cpu", "mean": "cpu"})


def test_keys_that_name_nothing_are_told():
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['hello'\]"):
        check_device_map(ModelForTest(), {"linear1": 0, "batchnorm": 1, "linear2": 1, "hello": 0})


def test_an_empty_model_needs_no_entries():
    check_device_map(nn.Sequential(), {})
