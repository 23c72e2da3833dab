"""`plan(…, machine=…, objective=…)`: predictions by what is known of a machine, and choices made by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up_machines import CPU, GPU, MACHINE, rate
from planning_models import Decoder
from torch import nn

from bigmodel.errors import MachineError, PlanError
from bigmodel.measuring import keep_machine
from bigmodel.planning import Plan, plan
from bigmodel.planning.needs import Needs
from bigmodel.planning.predicting import predict_forward

BLOCK = 2 * 16 * 16 * 4
BUDGETS = {0: 8 * BLOCK, "cpu": 10**6}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIGMODEL_CACHE", str(tmp_path))
    return tmp_path


def test_a_machine_gives_times():
    made = plan(Decoder(), BUDGETS, machine=MACHINE, context=7)
    assert made.prediction is not None
    assert (made.prediction.context, made.prediction.batch, made.prediction.source) == (7, 1, "measured")
    # Every byte that moves crosses the link at 10 bytes a second; all else is hidden.
    assert made.moved_bytes >= 5 * BLOCK
    assert made.prediction.decode_seconds >= made.moved_bytes / 10
    assert made.prediction.binds == "link to device 0"
    assert "decoding waits for the link to device 0" in " ".join(str(made).split())
    assert Plan.from_json(made.to_json()) == made


def test_the_map_is_the_same_with_and_without_a_prediction():
    assert plan(Decoder(), BUDGETS).device_map == plan(Decoder(), BUDGETS, machine=MACHINE).device_map


def test_without_rates_nothing_is_predicted():
    made = plan(Decoder(), BUDGETS)
    assert made.prediction is None
    assert all(advice.token_seconds is None for advice in made.advice)
    assert "Expected" not in str(made)


def test_what_was_measured_is_used_for_devices_that_it_has():
    with pytest.raises(PlanError, match="run `bigmodel bench`"):
        plan(Decoder(), BUDGETS, machine="measured")
    keep_machine(MACHINE)
    assert plan(Decoder(), BUDGETS).prediction == plan(Decoder(), BUDGETS, machine="measured").prediction is not None
    assert plan(Decoder(), {5: 10**6}).prediction is None
    with pytest.raises(MachineError, match="no rates for device 5, only for device 0, device 1, cpu"):
        plan(Decoder(), {5: 10**6}, machine="measured")


def test_accelerators_by_name():
    for machine in ("RTX 4090", ["RTX 4090"], {0: "RTX 4090"}, {"0": "rtx4090"}):
        made = plan(Decoder(), BUDGETS, machine=machine)
        assert made.prediction is not None
        assert made.prediction.source == "guess"  # of the host
    keep_machine(MACHINE)
    assert plan(Decoder(), BUDGETS, machine="RTX 4090").prediction.source == "table"
    assert plan(Decoder(), {0: 10**6, 1: 10**6}, machine=["T4", "T4"]).prediction is not None
    with pytest.raises(MachineError, match="RTX 4090"):
        plan(Decoder(), BUDGETS, machine="RTX 4099")
    with pytest.raises(MachineError, match="no rates for device 1, only for device 0, cpu"):
        plan(Decoder(), {0: 10**6, 1: 10**6}, machine=["T4"])


def test_accelerators_of_this_machine_are_looked_up(accelerators, monkeypatch):
    accelerators(1)
    assert plan(Decoder(), BUDGETS).prediction is None
    monkeypatch.setattr("bigmodel.planning.predicting.device_name", lambda device: "NVIDIA GeForce RTX 3060")
    assert plan(Decoder(), BUDGETS).prediction is not None
    assert plan(Decoder(), {0: 10**6, 1: 10**6}).prediction is None


def test_advice_tells_times_also_for_cards_that_are_not_there():
    made = plan(Decoder(), {0: 8 * BLOCK, "cpu": 10**6}, machine=MACHINE)
    one_more = next(advice for advice in made.advice if "one more card" in advice.change)
    assert one_more.token_seconds is not None
    assert one_more.token_seconds < made.prediction.decode_seconds


@pytest.mark.parametrize(("room", "overlap"), [(1.25, True), (1.5, False)])
def test_copies_and_arithmetic_overlap_where_the_reserve_holds_two_parts(room: float, overlap: bool):
    made = plan(Decoder(blocks=30, vocabulary=1), {0: int(room * BLOCK), "cpu": 10**6}, machine=MACHINE)
    assert (made.reserve_bytes >= 2 * BLOCK // 2) is overlap  # a part is half a block
    # Taking turns: staging, the link, and reading from the device's memory.
    seconds_per_byte = 1 / 10 if overlap else 1 / 20 + 1 / 10 + 1 / 100
    assert made.prediction.decode_seconds == pytest.approx(made.moved_bytes * seconds_per_byte, rel=0.05)


def test_single_forwards_of_a_planned_model():
    made = plan(Decoder(), BUDGETS, machine=MACHINE, context=16)
    once = predict_forward(Decoder(), made, MACHINE, tokens=1, past=16)
    assert (once.seconds, once.binds) == (made.prediction.decode_seconds, made.prediction.binds)
    prompt = predict_forward(Decoder(), made, MACHINE, tokens=16, is_cached=False)
    assert prompt.seconds == made.prediction.prefill_seconds
    with pytest.raises(PlanError, match=r"no place for '0': it is of another model \(Decoder\)"):
        predict_forward(nn.Sequential(nn.Linear(2, 2)), made, MACHINE, tokens=1)


def test_what_rests_on_disk_is_in_the_page_cache_if_ram_is_left():
    small, large = (replace(MACHINE, devices={**MACHINE.devices, "cpu": replace(CPU, memory_bytes=size)}) for size in (10_000, 10**6))
    budgets = {0: 8 * BLOCK, "cpu": 0}
    assert plan(Decoder(), budgets, machine=small).prediction.binds == "disk"
    assert plan(Decoder(), budgets, machine=large).prediction.binds == "link to device 0"


def test_an_objective_needs_rates_and_a_name():
    with pytest.raises(PlanError, match="needs to know how fast the machine is"):
        plan(Decoder(), BUDGETS, objective="latency")
    with pytest.raises(PlanError, match="'speed' is unknown"):
        plan(Decoder(), BUDGETS, machine=MACHINE, objective="speed")


def test_latency_leaves_out_what_slows_down():
    slow = replace(MACHINE, devices={0: GPU, 1: replace(GPU, memory=rate(1)), "cpu": replace(CPU, memory=rate(0.1))})
    budgets = {0: 10**6, 1: 10**6, "cpu": 10**6}
    assert set(plan(Decoder(), budgets, machine=slow).device_map.values()) == {0, 1}
    made = plan(Decoder(), budgets, machine=slow, objective="latency")
    assert made.device_map == {"": 0}
    assert "faster without: device 1" in str(made)


def test_latency_lets_the_cpu_compute_where_a_link_is_slower():
    near = replace(MACHINE, devices={0: replace(GPU, from_host=rate(0.01)), "cpu": CPU})
    made = plan(Decoder(), BUDGETS, machine=near, objective="latency")
    assert (made.main_device, made.moved_bytes) == ("cpu", 0)
    assert "faster without: device 0" in str(made)


def test_latency_keeps_every_device_where_none_slows_down():
    kept = plan(Decoder(), {0: 8 * BLOCK, 1: 8 * BLOCK, "cpu": 10**6}, machine=MACHINE, objective="latency")
    assert kept == plan(Decoder(), {0: 8 * BLOCK, 1: 8 * BLOCK, "cpu": 10**6}, machine=MACHINE)


def test_throughput_raises_the_batch_as_far_as_memory_goes(monkeypatch):
    cache = {f"layers.{index}": 100 for index in range(10)}  # bytes of one sequence
    monkeypatch.setattr(
        "bigmodel.planning.shared_work.needs_of",
        lambda model, workload, *_, **__: Needs({name: workload.batch * nbytes for name, nbytes in cache.items()}),
    )
    budgets = {0: 40_000, "cpu": 10**6}  # the model takes 28,800
    alone = plan(Decoder(), budgets, machine=MACHINE, context=128)
    made = plan(Decoder(), budgets, machine=MACHINE, context=128, objective="throughput")
    assert (alone.batch, made.batch) == (1, 11)  # one more, and weights would have to travel
    assert made.moved_bytes == 0
    assert made.prediction.batch == 11
    assert made.prediction.tokens_per_second > 5 * alone.prediction.tokens_per_second
    assert "Batch 11 rather than 1" in str(made)


def test_throughput_without_a_context_keeps_the_batch_and_says_so():
    made = plan(Decoder(), BUDGETS, machine=MACHINE, objective="throughput", batch=3)
    assert made.batch == 3
    assert "give context" in str(made)
    unknown = plan(Decoder(), BUDGETS, machine=MACHINE, objective="throughput", context=4)
    assert unknown.batch == 1
