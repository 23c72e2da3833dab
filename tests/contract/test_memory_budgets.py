"""Behaviour §2, devices and budgets."""

from __future__ import annotations

import logging

import psutil
import pytest
import torch
from contract_models import Bigger
from model_for_test import ModelForTest
from torch import nn

from bigmodel.utils import check_device_map, get_balanced_memory, get_max_memory
from bigmodel.utils.modeling import check_device_same, clean_device_map


def test_strings_become_bytes_in_the_callers_dict_too():
    given = {"cpu": "1GiB", 0: "10MB"}
    result = get_max_memory(given)
    assert list(result.items()) == [(0, 10_000_000), ("cpu", 2**30)]
    assert given == {"cpu": 2**30, 0: 10_000_000}
    assert min(given["cpu"], result["cpu"]) == 2**30  # what transformers does with both


def test_order_is_indices_then_mps_cpu_disk():
    assert list(get_max_memory({"disk": 1, "cpu": 2, "mps": 3, 2: 4, 0: 5})) == [0, 2, "mps", "cpu", "disk"]


def test_a_given_dict_is_not_completed(accelerators):
    accelerators(2)
    assert get_max_memory({0: 5}) == {0: 5}


def test_an_unknown_device():
    message = r"Device cuda:0 is not recognized, available devices are integers\(for GPU/XPU\), 'mps', 'cpu' and 'disk'"
    with pytest.raises(ValueError, match=message):
        get_max_memory({"cuda:0": 1})


def test_a_device_that_is_not_there_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert get_max_memory({7: 1, "cpu": 1}) == {7: 1, "cpu": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].name.startswith("bigmodel")
    assert "Device 7 is not available" in caplog.text


def test_measured_budgets(accelerators):
    accelerators(2, memory=["64MiB", "32MiB"])
    result = get_max_memory()
    assert list(result) == [0, 1, "cpu"]
    assert (result[0], result[1]) == (64 * 2**20, 32 * 2**20)
    assert 0 < result["cpu"] <= psutil.virtual_memory().total


def test_without_accelerators_the_cpu_alone():
    assert list(get_max_memory()) == ["cpu"]
    assert list(get_max_memory(None)) == ["cpu"]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("cpu", "cpu", True), ("cpu", "cpu:0", True), ("cuda", "cuda:0", True), ("cuda:0", "cuda:1", False), ("cpu", "cuda", False)],
)
def test_same_device(first, second, same):
    assert check_device_same(torch.device(first), torch.device(second)) is same


def test_balanced_over_devices():
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(6)])  # 400 bytes each
    # 2400 // 3 + 1.25 * 400
    assert get_balanced_memory(model, max_memory={0: 5000, 1: 5000, 2: 5000, "cpu": 7}) == {0: 1300, 1: 1300, 2: 5000, "cpu": 7}
    assert get_balanced_memory(model, max_memory={0: 1000, 1: 5000, 2: 5000}) == {0: 1000, 1: 1300, 2: 5000}


@pytest.mark.parametrize(
    ("given", "low_zero", "balanced"),
    [
        ({0: 200, 1: 200}, False, {0: 200, 1: 200}),
        ({0: 300, 1: 500}, False, {0: 215, 1: 500}),
        ({0: 300, 1: 500, "cpu": 1000}, False, {0: 215, 1: 500, "cpu": 1000}),
        ({0: 0, 1: 300, 2: 300}, False, {0: 0, 1: 215, 2: 300}),
        ({0: 0, 1: 300, 2: 300, 3: 500}, False, {0: 0, 1: 175, 2: 175, 3: 500}),
        ({0: 300, 1: 300}, True, {0: 0, 1: 300}),
        ({0: 300, 1: 300, 2: 300}, True, {0: 0, 1: 215, 2: 300}),
    ],
)
def test_the_plain_model_balanced(given, low_zero, balanced):
    assert get_balanced_memory(ModelForTest(), given, low_zero=low_zero) == balanced


def test_low_zero_leaves_the_first_device_what_the_others_cannot_take():
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(6)])
    assert get_balanced_memory(model, {0: 5000, 1: 5000, 2: 5000}, low_zero=True) == {0: 0, 1: 1700, 2: 5000}
    assert get_balanced_memory(model, {0: 5000, 1: 800, 2: 800}, low_zero=True) == {0: 800, 1: 800, 2: 800}


@pytest.mark.parametrize("classes", ["ModelForTest", ["ModelForTest"], ("ModelForTest",), {"ModelForTest"}])
def test_blocks_count_as_slack(classes):
    found = get_balanced_memory(Bigger(), {0: 5000, 1: 5000}, no_split_module_classes=classes)
    assert found == {0: 354 + int(1.25 * 236), 1: 5000}


def test_the_model_itself_is_no_block():
    class Nested(nn.Module):
        def __init__(self, *children: nn.Module) -> None:
            super().__init__()
            self.parts = nn.Sequential(*children)

    model = Nested(*[Nested(nn.Linear(10, 10, bias=False)) for _ in range(4)])  # 400 bytes each
    assert get_balanced_memory(model, {0: 5000, 1: 5000}, ["Nested"]) == {0: 800 + 500, 1: 5000}


def test_one_device_is_left_as_it_was_given():
    assert get_balanced_memory(ModelForTest(), {0: 300, "cpu": 5}) == {0: 300, "cpu": 5}
    assert get_balanced_memory(ModelForTest(), {0: 300, "cpu": 5}, low_zero=True) == {0: 300, "cpu": 5}
    assert get_balanced_memory(ModelForTest(), {0: 0, 1: 300}) == {0: 0, 1: 300}


def test_no_device_is_left_as_it_is():
    assert get_balanced_memory(ModelForTest(), {"cpu": 5, "disk": 9}) == {"cpu": 5, "disk": 9}


def test_one_measured_device_offers_nine_tenths(accelerators):
    accelerators(1, memory="64MiB")
    assert get_balanced_memory(ModelForTest())[0] == pytest.approx(0.9 * 64 * 2**20, abs=1)


def test_dtypes_scale_the_shares():
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(6)])
    assert get_balanced_memory(model, {0: 5000, 1: 5000}, dtype=torch.float16)[0] == 600 + 250
    assert get_balanced_memory(model, {0: 5000, 1: 5000}, None, torch.float16, {"0.weight": torch.float32})[0] > 850


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ({"a": 0}, {"a": 0}),
        ({"a": 0, "b": 0, "c": 0}, {"": 0}),
        ({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "c": 1}, {"a": 0, "b": 1, "c": 1}),
        ({"a.x.l": 0, "a.x.m": 0, "a.y": 1, "b": 1}, {"a.x": 0, "a.y": 1, "b": 1}),
        ({"a.1": 0, "a.10": 1, "a.2": 1}, {"a.1": 0, "a.10": 1, "a.2": 1}),
        ({"ab.x": 0, "a.x": 0, "a.y": 0, "c": "disk"}, {"ab.x": 0, "a": 0, "c": "disk"}),
        ({}, {}),
    ],
)
def test_maps_are_shortened_in_place(given, cleaned):
    assert clean_device_map(given) is given
    assert given == cleaned


def test_maps_are_shortened_below_a_module():
    given = {"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 0}
    assert clean_device_map(given, module_name="a") == {"a": 0, "b.x": 0, "b.y": 0}


def test_uncovered_tensors_are_listed():
    with pytest.raises(ValueError, match="does not give any device for the following parameters: linear1.weight, linear1.bias"):  # noqa: RUF043
        check_device_map(ModelForTest(), {"batchnorm": 0, "linear2": 1})
    with pytest.raises(ValueError, match="running_mean"):
        check_device_map(ModelForTest(), {"linear1": 0, "linear2": 1, "batchnorm.weight": 0, "batchnorm.bias": 0})
    assert check_device_map(ModelForTest(), {"": 0}) is None
    assert check_device_map(ModelForTest(), {"linear1": 0, "batchnorm": "disk", "linear2": "cpu"}) is None


def test_tensors_may_be_keys():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(nn.Linear(2, 2), {"weight": 0, "bias": 1})


def test_unknown_keys_warn():
    with pytest.warns(UserWarning, match=r"The following device_map keys do not match any submodules in the model: \['a', 'b'\]"):
        check_device_map(ModelForTest(), {"": 0, "a": 1, "b": 1})
