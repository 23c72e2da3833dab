"""The solver: fewest bytes moved, checked against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.planning.items import Item, Unit
from bigmodel.planning.knapsack import Kind, pack
from bigmodel.planning.resident import Tier
from bigmodel.planning.solver import Assignment, assign, ring_bytes, room_for_two, second_slot_costs_much, solve

checked = settings(max_examples=120, deadline=None, derandomize=True, database=None)


def unit(nbytes: int, *, staying: int = 0, rows_only: bool = False, uses: int = 1) -> Unit:
    items = tuple(Item(f"m{nbytes}.{use}", (), is_block=True, entries=(f"m{nbytes}.{use}",)) for use in range(uses))
    moving = nbytes - staying
    if rows_only or not moving:
        return Unit(items, nbytes, staying, 0, ())
    return Unit(items, nbytes, staying, moving * uses, (moving,) * min(uses, 2))


units_strategy = st.lists(
    st.builds(
        unit,
        st.integers(1, 9),
        staying=st.sampled_from([0, 0, 0, 1]),
        rows_only=st.sampled_from([False, False, False, False, True]),
        uses=st.sampled_from([1, 1, 1, 2]),
    ),
    min_size=1,
    max_size=6,
)
budgets_strategy = st.lists(st.integers(0, 24), min_size=1, max_size=2)


def least_moved(units: list[Unit], budgets: list[int], main: int, slots: int) -> float:
    """The fewest bytes moved over all assignments that fit, by trying them all; infinity if none does."""
    best = float("inf")
    limits = list(budgets)
    limits[main] -= sum(each.staying_bytes for each in units)
    for places in itertools.product([None, *range(len(budgets))], repeat=len(units)):
        room = list(limits)
        for each, place in zip(units, places, strict=True):
            if place is not None:
                room[place] -= each.stored_bytes if place == main else each.total_bytes
        offloaded = [each for each, place in zip(units, places, strict=True) if place is None]
        room[main] -= ring_bytes(offloaded, slots)
        if min(room) >= 0:
            best = min(best, sum(each.moved_bytes for each in offloaded))
    return best


def fits_without_offload(units: list[Unit], budgets: list[int]) -> bool:
    sizes = [each.total_bytes for each in units]
    return any(
        all(sum(size for size, at in zip(sizes, places, strict=True) if at == device) <= budgets[device] for device in range(len(budgets)))
        for places in itertools.product(range(len(budgets)), repeat=len(units))
    )


def solved(units: list[Unit], budgets: list[int], overlap_first: bool | None = None) -> Assignment | None:
    tiers = [Tier(index, budget) for index, budget in enumerate(budgets)]
    return solve(units, tiers, [Tier("disk", None)], overlap_first=overlap_first)


@pytest.mark.parametrize("overlap_first", [True, False])
@checked
@given(units=units_strategy, budgets=budgets_strategy)
def test_moves_as_few_bytes_as_any_assignment(overlap_first, units, budgets):
    found = solved(units, budgets, overlap_first)
    if fits_without_offload(units, budgets):
        assert found is not None
        assert found.moved_bytes == 0
        assert "disk" not in found.places
        return
    enough = room_for_two(units) - 1 if overlap_first else 10**9
    # A budget of nothing runs nothing, not even what needs no room.
    mains = [main for main, budget in enumerate(budgets) if budget > 0]
    two = min((least_moved(units, budgets, main, 2) for main in mains), default=float("inf"))
    capped = [min(budget, enough) for budget in budgets]
    one = min((least_moved(units, capped, main, 1) for main in mains if capped[main] > 0), default=float("inf"))
    if min(one, two) == float("inf"):
        assert found is None
    else:
        assert found is not None
        assert found.moved_bytes == min(one, two)
        assert found.is_optimal


@checked
@given(units_strategy, budgets_strategy, st.integers(0, 20), st.integers(0, 30))
def test_no_budget_is_exceeded_and_every_unit_has_a_place(units, budgets, host, disk):
    offers = {**dict(enumerate(budgets)), "cpu": host, "disk": disk}
    found = assign(units, offers)
    assert len(found.places) == len(units)
    used = dict.fromkeys(offers, 0)
    stores = {"disk"} if found.main == "cpu" else {"cpu", "disk"}
    for index, (each, place) in enumerate(zip(units, found.places, strict=True)):
        if index in found.unplaced:
            continue
        used[place] += each.stored_bytes if place in stores else each.total_bytes
        if place in stores:
            used[found.main] += each.staying_bytes
    ran_nowhere = found.slots == 0 and found.moved_bytes > 0
    used[found.main] += found.reserve_bytes
    for key, nbytes in used.items():
        assert nbytes <= offers[key] or (ran_nowhere and key == found.main)


@pytest.mark.parametrize("overlap_first", [True, False, None])
@checked
@given(units=units_strategy, budgets=budgets_strategy, which=st.integers(0, 1), more=st.integers(1, 4))
def test_more_budget_never_moves_more(overlap_first, units, budgets, which, more):
    def moved(limits: list[int]) -> float:
        found = solved(units, limits, overlap_first)
        return float("inf") if found is None else found.moved_bytes

    richer = list(budgets)
    richer[which % len(budgets)] += more
    assert moved(richer) <= moved(budgets)


@checked
@given(units_strategy, budgets_strategy)
def test_same_question_same_answer(units, budgets):
    offers = {**dict(enumerate(budgets)), "cpu": 7}
    assert assign(units, offers) == assign(list(units), dict(offers))


@checked
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=3),
    st.lists(st.integers(0, 25), min_size=1, max_size=3),
)
def test_packing_equals_trying_everything(kinds, capacities):
    found = pack([Kind(*kind) for kind in kinds], capacities)
    best = 0
    items = [kind[:3] for kind in kinds for _ in range(kind[3])]
    reachable = {(0, tuple(capacities))}
    for first_weight, weight, value in items:
        for worth, room in list(reachable):
            for position in range(len(room)):
                left = room[position] - (weight if position else first_weight)
                if left >= 0:
                    reachable.add((worth + value, (*room[:position], left, *room[position + 1 :])))
    best = max(worth for worth, _ in reachable)
    assert found is not None
    assert found.value == best


def test_a_required_unit_that_fits_nowhere_is_no_packing():
    assert pack([Kind(5, 5, 5, 2, required=1)], [4]) is None


@pytest.mark.parametrize("blocks", [200, 5000])
def test_many_equal_blocks_are_packed_optimally(blocks):
    units = [unit(370), *(unit(10) for _ in range(blocks)), unit(370)]
    budgets = {0: 10 * blocks // 2 + 5, 1: 10 * blocks // 4 + 5}
    found = assign(units, budgets)
    assert found.is_optimal
    # With both big ones kept, two small ones pass through: 20 bytes of ring, and every other multiple of ten is used.
    assert found.reserve_bytes == 20
    assert sum(each.total_bytes for each in units) - found.moved_bytes == 10 * blocks // 2 - 20 + 10 * blocks // 4


def test_ten_equal_blocks_on_two_devices_of_five_and_a_half():
    found = assign([unit(10) for _ in range(10)], {0: 55, 1: 55, "cpu": 100})
    assert found.places == (0,) * 5 + (1,) * 5
    assert found.moved_bytes == found.reserve_bytes == 0


def test_a_device_that_was_skipped_is_filled_later():
    found = assign([unit(37), *(unit(4) for _ in range(10))], {0: 30, 1: 40, 2: 20, "cpu": 100})
    assert found.moved_bytes == 0
    assert found.places[0] == 1
    assert 0 in found.places


def test_units_that_are_alike_stay_in_model_order():
    found = assign([unit(10) for _ in range(20)], {0: 70, 1: 60, "cpu": 50})
    assert found.places == (0,) * 5 + (1,) * 6 + ("cpu",) * 5 + ("disk",) * 4


def test_one_slot_where_two_do_not_fit():
    units = [unit(10) for _ in range(20)]
    found = assign(units, {0: 15})
    assert (found.slots, found.reserve_bytes) == (1, 10)
    found = assign(units, {0: 20})
    assert (found.slots, found.reserve_bytes) == (2, 20)


def test_the_budget_buys_the_second_slot_before_it_keeps_more():
    units = [unit(10) for _ in range(20)]
    kept = [20 - assign(units, {0: budget}).moved_bytes // 10 for budget in (19, 20, 29, 30, 40, 195, 200)]
    assert kept == [0, 0, 0, 1, 2, 17, 20]


def test_outsized_groups_are_kept_before_the_second_slot_is_bought():
    units = [unit(100), *(unit(10) for _ in range(40)), unit(100)]
    assert room_for_two(units) == 220
    assert not second_slot_costs_much(units)
    found = assign(units, {0: 219})
    assert (found.slots, found.reserve_bytes, found.moved_bytes) == (1, 10, 400)
    found = assign(units, {0: 240})
    assert (found.slots, found.reserve_bytes, found.moved_bytes) == (2, 20, 380)


def test_a_model_of_few_large_groups_rather_keeps_more_than_overlaps():
    units = [unit(10) for _ in range(3)]
    assert second_slot_costs_much(units)
    found = assign(units, {0: 25})
    assert (found.slots, found.moved_bytes) == (1, 20)


def test_cpu_computes_where_there_is_no_accelerator():
    found = assign([unit(10) for _ in range(20)], {"cpu": 70})
    assert found.main == "cpu"
    assert found.places == ("cpu",) * 5 + ("disk",) * 15
    assert (found.slots, found.reserve_bytes) == (2, 20)


def test_an_accelerator_too_small_for_any_block_is_left_out():
    found = assign([unit(10) for _ in range(3)], {0: 9, "cpu": 100})
    assert found.main == "cpu"
    assert set(found.places) == {"cpu"}


def test_the_first_accelerator_may_be_too_small_to_be_the_main_one():
    found = assign([unit(10) for _ in range(20)], {0: 9, 1: 60, "cpu": 500})
    assert found.main == 1
    assert found.moved_bytes == 160


def test_what_reads_single_rows_is_offloaded_first_and_needs_no_room():
    units = [unit(50, rows_only=True), *(unit(10) for _ in range(10))]
    found = assign(units, {0: 100, "cpu": 1000})
    assert found.places == ("cpu",) + (0,) * 10
    assert found.moved_bytes == found.reserve_bytes == 0
    assert assign(units, {0: 150, "cpu": 1000}).places == (0,) * 11


def test_buffers_that_stay_are_charged_to_the_main_device():
    units = [unit(10, staying=4) for _ in range(20)]
    found = assign(units, {0: 100, "cpu": 1000})
    assert found.places.count(0) == 1  # 20 × 4 stay, 2 × 6 pass through, 8 are left: one more block of 6
    assert found.moved_bytes == 19 * 6


def test_faster_store_is_filled_as_far_as_it_goes():
    found = assign([unit(7), unit(5), unit(5), *(unit(1) for _ in range(2))], {0: 7, "cpu": 10, "disk": 100})
    assert sum(size for size, place in zip((7, 5, 5, 1, 1), found.places, strict=True) if place == "cpu") <= 10
    assert "disk" in found.places
