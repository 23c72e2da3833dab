"""Budgets: given, measured, balanced."""

from __future__ import annotations

import logging

import numpy
import psutil
import pytest
import torch
from model_for_test import ModelForTest

from bigmodel.errors import PlanError
from bigmodel.planning import check_device_same, get_balanced_memory, get_max_memory
from bigmodel.planning.memory import measured_budgets, parse_budgets


def test_strings_become_bytes_in_the_callers_dict_too():
    given = {"disk": "1GB", "cpu": "2GiB", 1: 300, 0: "200KB"}
    assert list(get_max_memory(given).items()) == [(0, 200_000), (1, 300), ("cpu", 2 * 1024**3), ("disk", 10**9)]
    assert given == {"disk": 10**9, "cpu": 2 * 1024**3, 1: 300, 0: 200_000}


def test_a_given_dict_is_not_completed():
    assert get_max_memory({0: 10}) == {0: 10}


def test_unknown_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="Device cuda:0 is not recognized, available devices are integers"):
        get_max_memory({"cuda:0": 1})
    with pytest.raises(PlanError, match="gpu7"):
        parse_budgets({"gpu7": "1GB"})


def test_what_this_machine_has_is_told_of_as_it_is(accelerators):
    with pytest.raises(
        PlanError, match="'cuda:0' in max_memory is not recognized: torch sees no accelerator on this machine, only 'cpu'"
    ) as caught:
        parse_budgets({"cuda:0": 1})
    assert "mps" not in str(caught.value)
    accelerators(2)
    with pytest.raises(PlanError, match=r"there are 2 accelerators of type 'sim' \(0 to 1\), and 'cpu'"):
        parse_budgets({"cuda:0": 1})


def test_numbers_of_numpy_are_devices_and_bytes():
    given = {numpy.int64(1): numpy.int64(300), numpy.int32(0): numpy.float32(200), "cpu": numpy.uint8(7)}
    for read in (get_max_memory, parse_budgets):
        budgets = read(dict(given))
        assert list(budgets.items()) == [(0, 200), (1, 300), ("cpu", 7)]
        assert {type(part) for item in budgets.items() for part in item} == {int, str}


@pytest.mark.parametrize("size", [float("nan"), float("inf"), -0.5, numpy.float32("nan"), numpy.int64(-3), [1]])
def test_what_is_no_number_of_bytes_is_refused_with_its_device(size):
    for read in (get_max_memory, parse_budgets):
        with pytest.raises(PlanError, match=r"Budget of device 'cpu': .*bytes"):
            read({"cpu": size})


@pytest.mark.parametrize("size", [-1, "-1GB", "lots"])
def test_unreadable_budgets_are_refused(size):
    for read in (get_max_memory, parse_budgets):
        with pytest.raises(ValueError, match=str(size)):
            read({0: size})


def test_devices_that_are_not_there_are_only_mentioned(caplog):
    with caplog.at_level(logging.WARNING):
        assert get_max_memory({999: 10}) == {999: 10}
    assert "Device 999 is not available" in caplog.text


def test_without_a_dict_the_machine_is_asked():
    assert list(get_max_memory()) == list(measured_budgets())
    available = psutil.virtual_memory().available
    assert 0 < get_max_memory()["cpu"] <= available * 1.1


def test_measured_budgets_keep_a_margin_and_do_not_flicker(monkeypatch):
    total = 64 << 30
    for free in (40 << 30, (40 << 30) + 12_345_678):
        monkeypatch.setattr("bigmodel.planning.memory.device_memory", lambda device, free=free: (free, total))
        assert measured_budgets()["cpu"] == 36 << 30  # 90 %, in steps of 512 MiB


def test_accelerators_are_measured(accelerators):
    devices = accelerators(2, memory=64 << 20)
    measured = measured_budgets()
    assert list(measured) == [0, 1, "cpu"]
    for index in range(len(devices)):
        assert 0.9 * (64 << 20) <= measured[index] <= 0.95 * (64 << 20)
    assert list(get_max_memory()) == [0, 1, "cpu"]


def test_any_spelling_of_a_device_is_a_budget(accelerators):
    device = accelerators(2)[1]
    assert parse_budgets({device: "1KiB", torch.device("cpu"): 5}) == {1: 1024, "cpu": 5}
    assert parse_budgets({str(device): 7.0}) == {1: 7}


def test_a_device_has_one_budget():
    with pytest.raises(PlanError, match="'cpu' stands twice"):
        parse_budgets({"cpu": 5, torch.device("cpu"): 6})


def test_made_up_devices_have_budgets():
    given = {17: "1KiB", 3: 5, "disk": 0}
    assert list(parse_budgets(given).items()) == [(3, 5), (17, 1024), ("disk", 0)]
    assert given == {17: "1KiB", 3: 5, "disk": 0}


@pytest.mark.parametrize(
    ("given", "balanced"),
    [
        ({0: 200, 1: 200}, {0: 200, 1: 200}),
        ({0: 300, 1: 300}, {0: 215, 1: 300}),
        ({0: 300, 1: 500}, {0: 215, 1: 500}),
        ({0: 300, "cpu": 1000}, {0: 300, "cpu": 1000}),
        ({0: 0, 1: 300, 2: 300}, {0: 0, 1: 215, 2: 300}),
        ({0: 0, "cpu": 100}, {0: 0, "cpu": 100}),
        ({"cpu": 100, "disk": 5}, {"cpu": 100, "disk": 5}),
    ],
)
def test_budgets_are_balanced(given, balanced):
    assert get_balanced_memory(ModelForTest(), max_memory=given) == balanced


def test_first_device_is_left_empty_on_demand():
    assert get_balanced_memory(ModelForTest(), {0: 300, 1: 300, 2: 300}, low_zero=True) == {0: 0, 1: 215, 2: 300}
    assert get_balanced_memory(ModelForTest(), {0: 300, 1: 100, 2: 100}, low_zero=True) == {0: 36, 1: 100, 2: 100}


@pytest.mark.parametrize("classes", ["Linear", ["Linear"], ("Linear",), {"Linear"}])
def test_the_first_block_of_each_class_counts_as_slack(classes):
    # 118 + 1.25 × max(64, mean leaf 78)
    assert get_balanced_memory(ModelForTest(), {0: 300, 1: 300}, no_split_module_classes=classes)[0] == 215


def test_one_measured_accelerator_offers_nine_tenths(accelerators):
    accelerators(1, memory=64 << 20)
    free = get_max_memory()[0]
    assert get_balanced_memory(ModelForTest())[0] == int(free * 0.9)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("cpu", "cpu", True), ("cuda", "cuda:0", True), ("cuda:1", "cuda", False), ("cuda:0", "cpu", False), ("meta", "meta", True)],
)
def test_same_device(first, second, same):
    assert check_device_same(torch.device(first), torch.device(second)) is same
