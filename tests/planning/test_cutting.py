"""Blocks are cut at their children where nothing else works, and only there."""

from __future__ import annotations

import logging

import pytest
from planning_models import Decoder, bytes_on

from bigmodel.device_map import device_for
from bigmodel.errors import PlanError
from bigmodel.planning import check_device_map, infer_auto_device_map, plan

MATRIX = 4 * 16 * 16  # a Decoder's block at width 16 is two of them


def small() -> Decoder:
    return Decoder(blocks=2, vocabulary=1)


NOWHERE_ELSE = {"cpu": 0, "disk": 0}


def test_a_block_larger_than_every_device_is_cut_where_there_is_no_store():
    budgets = dict.fromkeys(range(4), MATRIX + 300)
    made = plan(small(), {**budgets, **NOWHERE_ELSE})
    assert {device_for(f"layers.{index}.up", made.device_map) for index in range(2)} <= {0, 1, 2, 3}
    assert set(made.device_map.values()) == {0, 1, 2, 3}
    assert made.moved_bytes == 0
    assert any("Cut at their children" in note and "layers.0–1" in note for note in made.notes)
    assert made.blocks == ()
    check_device_map(small(), made.device_map)
    for device, budget in budgets.items():
        assert bytes_on(small(), made.device_map, device) <= budget


def test_it_is_not_cut_where_it_can_pass_through_in_parts():
    made = plan(small(), {**dict.fromkeys(range(4), MATRIX + 300), "cpu": 10**6})
    assert not any(".up" in name or ".down" in name for name in made.device_map)
    assert not any("Cut" in note for note in made.notes)


def test_only_blocks_that_are_too_large_are_cut_if_that_will_do():
    model = small()
    made = plan(model, {0: 2 * MATRIX + 300, 1: MATRIX, 2: MATRIX, **NOWHERE_ELSE})
    assert any("Cut at their children" in note for note in made.notes)
    whole = [
        index
        for index in range(2)
        if device_for(f"layers.{index}.up", made.device_map) == device_for(f"layers.{index}.down", made.device_map)
    ]
    assert len(whole) == 1


def test_what_fits_nowhere_even_in_parts_is_refused():
    with pytest.raises(PlanError, match="leave no room for"):
        plan(small(), {0: MATRIX, 1: MATRIX, **NOWHERE_ELSE})


def test_maps_of_scripts_too(caplog):
    with caplog.at_level(logging.WARNING):
        found = infer_auto_device_map(small(), {**dict.fromkeys(range(4), MATRIX + 300), "disk": 0})
    assert set(found.values()) == {0, 1, 2, 3}
    assert "Cut at their children" in caplog.text
