"""Budgets that are names of accelerators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.constants import GiB
from bigmodel.errors import PlanError
from bigmodel.named_budgets import named_budgets


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleList([nn.Linear(8192, 8192, bias=False) for _ in range(160)])  # 40 GiB


def test_names_become_nine_tenths_of_their_memory() -> None:
    found = named_budgets({0: "RTX 4090", 1: "nvidia geforce rtx 4090", "cpu": "64GB", "disk": 5})
    assert found.max_memory == {0: int(0.9 * 24 * GiB), 1: int(0.9 * 24 * GiB), "cpu": "64GB", "disk": 5}
    assert found.machine == {0: "RTX 4090", 1: "RTX 4090"}
    assert found.notes == ("RTX 4090: 90% of its 24.00 GiB are planned with; driver, error correction and torch take the rest.",)


def test_sizes_stay_and_name_no_machine() -> None:
    assert named_budgets({0: "24GiB", "cpu": 10**9}).max_memory == {0: "24GiB", "cpu": 10**9}
    assert named_budgets({0: "24GiB"}).machine is None
    assert named_budgets({0: "24GiB", 1: "T4"}).machine is None
    assert named_budgets(None).max_memory is None


def test_a_plan_for_named_cards_says_what_it_assumes_and_how_fast_it_is() -> None:
    made = bigmodel.plan(model(), {0: "RTX 4090", "cpu": "64GiB"})
    assert made.devices[0].budget_bytes == int(0.9 * 24 * GiB)
    assert "RTX 4090: 90% of its 24.00 GiB" in " ".join(made.notes)
    assert made.prediction is not None
    assert made.prediction.decode_seconds > made.moved_bytes / 64e9  # no faster than its link, a PCIe 4.0 of 16 lanes both ways
    assert all(each.token_seconds is not None for each in made.advice)
    slower = bigmodel.plan(model(), {0: "RTX 4090", "cpu": "64GiB"}, machine="T4")
    assert slower.prediction.decode_seconds > made.prediction.decode_seconds
    assert bigmodel.Plan.from_json(made.to_json()) == made


def test_an_objective_is_passed_on() -> None:
    made = bigmodel.plan(model(), {0: "H100 SXM", "cpu": "64GiB"}, objective="throughput", context=128)
    assert made.batch >= 1
    with pytest.raises(PlanError, match="'speed'"):
        bigmodel.plan(model(), {0: "H100 SXM"}, objective="speed")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("lots", r"Budget of device 0: 'lots' is no size such as '24GiB'\. .*'lots'"),
        ("A100", r"Budget of device 0: 'A100' is no size .* may be"),
        ("-3GiB", r"Budget of device 0: Size '-3GiB' is not understood"),
        ("24G", r"Budget of device 0: Size '24G' is not understood.*GiB"),
        ("1TB", r"Budget of device 0: Size '1TB' is not understood"),
        ("0=24GiB", r"Budget of device 0: Size '0=24GiB' is not understood"),
        ("1e400GiB", r"Budget of device 0: Size '1e400GiB' is more than a number can hold"),
        ("12", r"Budget of device 0: Size '12' is not understood"),
        ("M2 Max", r"Budget of device 0: M2 Max comes with several sizes"),
    ],
)
def test_what_is_neither_is_explained(size: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        bigmodel.plan(model(), {0: size})


def test_ram_and_disk_are_no_accelerators() -> None:
    for device in ("cpu", "disk"):
        with pytest.raises(PlanError, match=f"Budget of device '{device}': Size 'RTX 4090' is not understood"):
            bigmodel.plan(model(), {device: "RTX 4090"})


@pytest.mark.parametrize("budgets", [["24GiB"], "24GiB", 10**9])
def test_budgets_say_whose_they_are(budgets: object) -> None:
    for read in (lambda: bigmodel.plan(model(), budgets), lambda: bigmodel.infer_auto_device_map(model(), budgets)):
        with pytest.raises(PlanError, match=r"max_memory=.* says of no device what it offers"):
            read()
