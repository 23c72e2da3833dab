"""`plan(…, execution="auto")`: blocks that rest in RAM run there where the cost model expects a step to take less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_machines import CPU, GPU, MACHINE, rate
from planning_models import Decoder

from bigmodel.errors import PlanError
from bigmodel.planning import Plan, plan
from bigmodel.planning.predicting import predict_forward

BLOCK = 2 * 16 * 16 * 4
BUDGETS = {0: 8 * BLOCK, "cpu": 10**6}
SLOW_LINK = MACHINE
"""10 bytes a second over the link, 100 from the memory of either."""
FAST_LINK = replace(MACHINE, devices={**MACHINE.devices, 0: replace(GPU, from_host=rate(10**6))}, ram=rate(10**6))


def running_there(made: Plan) -> list[str]:
    return [name for name, device in made.device_map.items() if device == "cpu:resident"]


def test_behind_a_slow_link_blocks_run_where_they_rest():
    before = plan(Decoder(), BUDGETS, machine=SLOW_LINK)
    made = plan(Decoder(), BUDGETS, machine=SLOW_LINK, execution="auto")
    assert running_there(before) == []
    assert running_there(made)
    assert made.prediction.decode_seconds < before.prediction.decode_seconds
    assert made.moved_bytes < before.moved_bytes
    host = next(use for use in made.devices if use.device == "cpu")
    assert host.resident_bytes > 0
    held = sum(use.resident_bytes + use.offloaded_bytes + use.staying_bytes for use in made.devices)
    assert held == made.total_bytes
    assert "(cpu:resident)" in " ".join(made.notes)
    assert made.prediction.decode_seconds == pytest.approx(predict_forward(Decoder(), made, SLOW_LINK, tokens=1, past=512).seconds)
    assert Plan.from_json(made.to_json()) == made
    assert "cpu" in str(made)


def test_room_that_the_ring_leaves_is_used():
    made = plan(Decoder(), BUDGETS, machine=SLOW_LINK, execution="auto")
    first = made.devices[0]
    assert made.moved_bytes == 0
    assert first.reserve_bytes == 0
    assert first.left_bytes < BLOCK


def test_behind_a_fast_link_weights_travel():
    made = plan(Decoder(), BUDGETS, machine=FAST_LINK, execution="auto")
    assert running_there(made) == []
    assert made == plan(Decoder(), BUDGETS, machine=FAST_LINK)


def test_a_slow_processor_leaves_them_to_the_accelerator():
    slow = replace(MACHINE, devices={**MACHINE.devices, "cpu": replace(CPU, memory=rate(1))})
    assert running_there(plan(Decoder(), BUDGETS, machine=slow, execution="auto")) == []


def test_blocks_on_disk_and_plans_without_an_accelerator_stay_as_they_are():
    for budgets in ({0: 8 * BLOCK, "cpu": 0}, {"cpu": 10 * BLOCK}):
        made = plan(Decoder(), budgets, machine=SLOW_LINK, execution="auto", advice=False)
        assert made == plan(Decoder(), budgets, machine=SLOW_LINK, advice=False)


def test_the_processors_budget_has_room_for_what_they_bring_along():
    free = plan(Decoder(), {0: 10**5, "cpu": 10**6}, machine=SLOW_LINK, context=64)
    tight = {0: free.devices[0].used_bytes // 2, "cpu": 10**6}
    made = plan(Decoder(), tight, machine=SLOW_LINK, context=64, execution="auto")
    for use in made.devices:
        assert use.budget_bytes is None or use.used_bytes <= use.budget_bytes, use


def test_it_needs_rates_and_a_known_word(tmp_path, monkeypatch):
    monkeypatch.setenv("BIGMODEL_CACHE", str(tmp_path))
    with pytest.raises(PlanError, match=r"execution='auto' needs to know how fast the machine is"):
        plan(Decoder(), BUDGETS, execution="auto")
    with pytest.raises(PlanError, match="'cpu' is unknown"):
        plan(Decoder(), BUDGETS, machine=MACHINE, execution="cpu")
