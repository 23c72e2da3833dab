"""The cost model, worked out by hand on machines of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_machines import CPU, GPU, MACHINE, rate

from bigmodel.errors import MachineError
from bigmodel.planning.cost import Moving, Run, Stage, forward, load_seconds, predict

RUN = Run("bfloat16", 2)
RESIDENT = Stage("resident", 0, 0, weights=50, weight_bytes=100)
"""One row: 0.1 s of arithmetic, 1 s of reading."""
FROM_RAM = replace(RESIDENT, name="from RAM", rests_on="cpu", moved_bytes=100)
"""5 s to copy it into staging memory, 10 s over the link."""
FROM_DISK = replace(FROM_RAM, name="from disk", rests_on="disk")
"""20 s from the disk, or 2.5 s out of the page cache; 10 s over the link."""
ON_CPU = replace(FROM_DISK, name="on the CPU", runs_on="cpu")

TWO, ONE, PARTS = Moving(2), Moving(1, overlaps=False), Moving(0)
COPIES = Moving(2, maps_files=False)


def seconds(*stages: Stage, run: Run = RUN, moving: Moving = TWO, machine=MACHINE, tokens: int = 1, past: int = 0, is_cached: bool = True):
    found = forward(stages, machine, run, moving, tokens=tokens, past=past, is_cached=is_cached)
    assert found.seconds == pytest.approx(sum(found.waits.values()))
    return pytest.approx(found.seconds), found.binds


def test_what_is_resident_takes_the_longer_of_reading_and_multiplying():
    assert seconds(RESIDENT, RESIDENT) == (2.0, "memory of device 0")
    assert seconds(RESIDENT, RESIDENT, tokens=100) == (20.0, "arithmetic of device 0")
    assert seconds(RESIDENT, run=replace(RUN, batch=4), tokens=25) == (10.0, "arithmetic of device 0")
    assert seconds() == (0.0, "")


def test_with_two_slots_a_transfer_hides_arithmetic_or_is_hidden():
    assert seconds(*[FROM_RAM] * 3) == (30.0, "link to device 0")
    assert seconds(*[FROM_RAM] * 3, tokens=1000) == (300.0, "arithmetic of device 0")


def test_both_legs_of_a_transfer_are_under_way_at_once_only_where_work_is_queued():
    waiting = replace(MACHINE, devices={0: replace(GPU, queues=False), "cpu": CPU})
    assert seconds(*[FROM_RAM] * 3, machine=waiting) == (45.0, "link to device 0")


def test_with_one_slot_they_take_turns():
    assert seconds(*[FROM_RAM] * 3, moving=ONE) == (48.0, "link to device 0")
    assert seconds(*[FROM_RAM] * 3, moving=ONE, tokens=1000) == (345.0, "arithmetic of device 0")


def test_parts_overlap_as_whole_groups_do():
    assert seconds(*[FROM_RAM] * 3, moving=PARTS) == seconds(*[FROM_RAM] * 3)
    assert seconds(FROM_RAM, FROM_RAM, moving=PARTS) == (20.0, "link to device 0")  # but none is held until its turn comes again


def test_what_the_ring_holds_is_not_brought_again():
    assert seconds(FROM_RAM, FROM_RAM) == (2.0, "memory of device 0")
    assert seconds(FROM_RAM, moving=ONE) == (1.0, "memory of device 0")
    assert seconds(FROM_RAM, FROM_RAM, moving=ONE) == (32.0, "link to device 0")


def test_resident_stages_compute_while_the_next_transfer_is_under_way():
    long = replace(RESIDENT, weight_bytes=900)
    assert seconds(FROM_RAM, long, FROM_RAM, FROM_RAM) == (30.0, "link to device 0")
    assert seconds(FROM_RAM, FROM_RAM, FROM_RAM, long) == (30.0, "link to device 0")
    assert seconds(long, FROM_RAM, FROM_RAM, FROM_RAM) == (30.0, "link to device 0")  # the forward before has begun the transfer
    assert seconds(FROM_RAM, long, long, FROM_RAM, FROM_RAM) == (39.0, "link to device 0")  # 1 + 9 + 9, 10, 10
    assert seconds(FROM_RAM, long, moving=ONE) == (10.0, "memory of device 0")  # one group, which stays in the ring


def test_page_locked_ram_is_not_copied_first():
    slow = replace(MACHINE, ram=rate(5))
    assert seconds(*[FROM_RAM] * 3, machine=slow) == (60.0, "RAM")
    assert seconds(*[FROM_RAM] * 3, machine=slow, moving=Moving(2, locks_ram=True)) == (30.0, "link to device 0")
    assert seconds(*[FROM_RAM] * 3, moving=Moving(1, overlaps=False, locks_ram=True)) == (33.0, "link to device 0")


def test_the_disk_is_read_unless_the_page_cache_holds_the_file():
    assert seconds(*[FROM_DISK] * 3) == (30.0, "link to device 0")
    assert seconds(*[FROM_DISK] * 3, is_cached=False) == (60.0, "disk")
    assert seconds(*[FROM_DISK] * 3, is_cached=False, moving=ONE) == (93.0, "disk")


def test_on_the_cpu_copies_and_arithmetic_share_the_cores():
    # 2.5 s of copying by four threads and 1 s of arithmetic by two, on four cores: 3 s.
    assert seconds(*[ON_CPU] * 3, moving=COPIES) == (9.0, "cores of cpu")
    few = replace(MACHINE, compute_threads=1, reading_threads=1)
    assert seconds(*[ON_CPU] * 3, moving=COPIES, machine=few) == (7.5, "page cache")
    assert seconds(*[ON_CPU] * 3, moving=COPIES, is_cached=False) == (60.0, "disk")
    assert seconds(*[ON_CPU] * 3, moving=replace(COPIES, overlaps=False)) == (10.5, "page cache")


def test_pages_that_are_used_in_place_are_not_copied():
    assert seconds(*[ON_CPU] * 3) == (3.0, "memory of cpu")
    for moving in (TWO, ONE, PARTS):  # nor do they need a ring to be read ahead
        assert seconds(*[ON_CPU] * 3, moving=moving, is_cached=False) == (60.0, "disk")
    # Reading ahead takes the cores as well: 2.5 s of filling pages by four threads and 1 s of arithmetic by two, on four cores.
    assert seconds(*[ON_CPU] * 3, is_cached=False, machine=replace(MACHINE, disk=rate(50))) == (9.0, "cores of cpu")
    converted = replace(ON_CPU, file_bytes=200, loaded_bytes=100)
    assert seconds(*[converted] * 3) == (9.0, "cores of cpu")
    assert seconds(*[FROM_DISK] * 3) == (30.0, "link to device 0")  # a link has to be crossed in any case


def test_only_the_experts_that_tokens_choose_are_read():
    moe = Stage("experts", 0, 0, expert_weights=400, expert_bytes=800)
    run = replace(RUN, experts=8, experts_per_token=2)
    assert seconds(moe, run=run) == (2.0, "memory of device 0")  # a quarter of 800 bytes
    # Two tokens: each misses an expert with 3/4, both with 9/16.
    assert seconds(moe, run=run, tokens=2) == (8 * 7 / 16, "memory of device 0")
    # A thousand tokens: all experts, 250 rows each.
    assert seconds(moe, run=run, tokens=1000) == (200.0, "arithmetic of device 0")


def test_packed_weights_are_unpacked_for_more_than_one_row():
    packed = replace(RESIDENT, weight_bytes=25)
    assert seconds(packed) == (0.25, "memory of device 0")
    # Read 25, write and read 100 bytes: 2.25 s, then 1 s of arithmetic.
    assert seconds(packed, tokens=10) == (3.25, "memory of device 0")


def test_calls_cost_time_where_nothing_else_hides_it():
    slow = replace(MACHINE, devices={0: replace(GPU, call_seconds=0.5), "cpu": replace(CPU, call_seconds=0.5)})
    stage = replace(RESIDENT, calls=10)
    assert seconds(stage, machine=slow) == (5.0, "calls on device 0")
    assert seconds(stage, machine=slow, tokens=100) == (10.0, "arithmetic of device 0")
    assert seconds(replace(stage, runs_on="cpu", rests_on="cpu"), machine=slow) == (6.0, "calls on cpu")


def test_attention_grows_with_what_lies_behind():
    stage = Stage("attention", 0, 0, attention_width=10, cache_bytes=200)
    # One token attends to 100: 4 × 10 × 100 operations; the cache has 200 bytes.
    assert seconds(stage, past=99) == (4.0 + 2.0, "arithmetic of device 0")
    # Without a cache, three new tokens attend to two on average.
    assert seconds(stage, tokens=3) == (4 * 10 * 3 * 2 / 1000, "arithmetic of device 0")


def test_activations_and_rows_of_tables_take_their_time():
    machine = replace(MACHINE, devices={**MACHINE.devices, 0: replace(GPU, activation=rate(10))})
    assert seconds(Stage("norms", 0, 0, activation_width=5), machine=machine, tokens=7) == (7.0, "memory of device 0")
    assert seconds(Stage("table", 0, "disk", row_bytes=20), tokens=4) == (2.0 + 8.0, "link to device 0")


def test_outputs_cross_from_device_to_device():
    run = replace(RUN, hidden_width=5)
    there = replace(RESIDENT, runs_on=1, rests_on=1)
    on_cpu = replace(RESIDENT, runs_on="cpu", rests_on="cpu")
    # 10 tokens of 10 bytes: 2 s between devices, 10 s to one from RAM, 4 s back.
    assert seconds(RESIDENT, there, run=run, tokens=10)[0] == 2.0 + 2.0
    assert seconds(on_cpu, RESIDENT, run=run, tokens=10)[0] == 2.0 + 10.0
    assert seconds(RESIDENT, on_cpu, run=run, tokens=10)[0] == 2.0 + 4.0


def test_loading_goes_at_the_pace_of_the_slowest():
    def loaded(stage: Stage, file_bytes: int, loaded_bytes: int) -> Stage:
        return replace(stage, file_bytes=file_bytes, loaded_bytes=loaded_bytes)

    assert load_seconds([loaded(RESIDENT, 100, 100)], MACHINE) == 20.0
    assert load_seconds([loaded(RESIDENT, 100, 100), loaded(FROM_DISK, 1000, 1000)], MACHINE) == 20.0  # stays where it is
    assert load_seconds([loaded(RESIDENT, 100, 400)], MACHINE) == 40.0  # the link
    assert load_seconds([loaded(FROM_RAM, 100, 200)], replace(MACHINE, ram=rate(1))) == 100.0  # the cast


def test_a_prediction_is_cold_at_first_and_warm_later_if_ram_allows():
    stages = [FROM_DISK] * 3
    found = predict(stages, MACHINE, RUN, Moving(2, cached_bytes=300), context=10)
    assert (found.prefill_seconds, found.decode_seconds, found.binds) == (60.0, 30.0, "link to device 0")
    assert (found.context, found.batch, found.source) == (10, 1, "measured")
    assert found.prefill_tokens_per_second == pytest.approx(10 / 60)
    short = predict(stages, MACHINE, RUN, Moving(2, cached_bytes=299), context=10)
    assert (short.decode_seconds, short.binds) == (60.0, "disk")


def test_a_batch_decodes_more_tokens_in_a_step():
    found = predict([RESIDENT], MACHINE, replace(RUN, batch=8), Moving(0), context=4)
    assert found.decode_seconds == 1.0  # still bound by reading the weights
    assert found.tokens_per_second == 8.0


def test_the_least_reliable_rate_is_told():
    guessed = replace(MACHINE, ram=replace(MACHINE.ram, source="guess"))
    assert predict([RESIDENT], guessed, RUN, TWO).source == "measured"
    assert predict([FROM_RAM], guessed, RUN, TWO).source == "guess"
    table = replace(MACHINE, devices={0: replace(GPU, memory=replace(GPU.memory, source="table"))})
    assert predict([RESIDENT], table, RUN, TWO).source == "table"


def test_a_device_without_rates_is_named():
    with pytest.raises(MachineError, match="no rates for device 7, only for device 0, device 1, cpu"):
        seconds(replace(RESIDENT, runs_on=7, rests_on=7))
