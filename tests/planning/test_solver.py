"""The solver: fewest bytes moved, checked against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.planning.items import Item, Unit
from bigmodel.planning.knapsack import Kind, pack
from bigmodel.planning.resident import Tier
from bigmodel.planning.solver import Assignment, assign, least_ring_bytes, ring_bytes, solve

checked = settings(max_examples=120, deadline=None, derandomize=True, database=None)


def unit(nbytes: int, *, staying: int = 0, state: int = 0, rows_only: bool = False, uses: int = 1, part: int | None = None) -> Unit:
    """A unit of `nbytes` tensors, of which `staying` do not travel, and whose largest part takes `part`."""
    items = tuple(Item(f"m{nbytes}.{use}", (), is_block=True, entries=(f"m{nbytes}.{use}",)) for use in range(uses))
    moving = nbytes - staying
    if rows_only or not moving:
        return Unit(items, nbytes + state, staying + state, 0, (), 0, state)
    least = moving if part is None else min(part, moving)
    return Unit(items, nbytes + state, staying + state, moving * uses, (moving,) * min(uses, 2), least, state)


units_strategy = st.lists(
    st.builds(
        unit,
        st.integers(1, 9),
        staying=st.sampled_from([0, 0, 0, 1]),
        state=st.sampled_from([0, 0, 1, 3]),
        rows_only=st.sampled_from([False, False, False, False, True]),
        uses=st.sampled_from([1, 1, 1, 2]),
        part=st.sampled_from([None, 1, 2, 4]),
    ),
    min_size=1,
    max_size=6,
)
budgets_strategy = st.lists(st.integers(0, 24), min_size=1, max_size=3)


def least_moved(units: list[Unit], budgets: list[int], main: int) -> float:
    """The fewest bytes moved over all assignments that fit, by trying them all; infinity if none does."""
    best = float("inf")
    for places in itertools.product([None, *range(len(budgets))], repeat=len(units)):
        room = list(budgets)
        offloaded = []
        for each, place in zip(units, places, strict=True):
            room[main if place is None else place] -= each.staying_bytes if place is None else each.total_bytes
            if place is None:
                offloaded.append(each)
        room[main] -= least_ring_bytes(offloaded)
        if min(room) >= 0:
            best = min(best, sum(each.moved_bytes for each in offloaded))
    return best


def fits_without_offload(units: list[Unit], budgets: list[int]) -> bool:
    sizes = [each.total_bytes for each in units]
    return any(
        all(sum(size for size, at in zip(sizes, places, strict=True) if at == device) <= budgets[device] for device in range(len(budgets)))
        for places in itertools.product(range(len(budgets)), repeat=len(units))
    )


def solved(units: list[Unit], budgets: list[int]) -> Assignment | None:
    tiers = [Tier(index, budget) for index, budget in enumerate(budgets)]
    return solve(units, tiers, [Tier("disk", None)])


@checked
@given(units=units_strategy, budgets=budgets_strategy)
def test_moves_as_few_bytes_as_any_assignment(units, budgets):
    found = solved(units, budgets)
    if fits_without_offload(units, budgets):
        assert found is not None
        assert found.moved_bytes == 0
        assert "disk" not in found.places
        return
    best = min(least_moved(units, budgets, main) for main in range(len(budgets)))
    if best == float("inf"):
        assert found is None
    else:
        assert found is not None
        assert found.moved_bytes == best
        assert found.is_optimal
        offloaded = [each for each, place in zip(units, found.places, strict=True) if place == "disk"]
        assert found.reserve_bytes >= least_ring_bytes(offloaded)
        assert found.slots == max((slots for slots in (0, 1, 2) if found.reserve_bytes >= ring_bytes(offloaded, slots)), default=0) or (
            found.slots == sum(len(each.slot_bytes) for each in offloaded)
        )


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
    used[found.main] += found.reserve_bytes
    for key, nbytes in used.items():
        assert nbytes <= offers[key] or (not found.can_run and key == found.main)


@checked
@given(units=units_strategy, budgets=budgets_strategy, which=st.integers(0, 2), more=st.integers(1, 4))
def test_more_budget_never_moves_more(units, budgets, which, more):
    def moved(limits: list[int]) -> float:
        found = solved(units, limits)
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
    # With both big ones kept, small ones pass through: 10 bytes of ring, what is left over goes there, and all other tens are used.
    assert found.reserve_bytes == 15
    assert sum(each.total_bytes for each in units) - found.moved_bytes == 10 * blocks // 2 - 10 + 10 * blocks // 4


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
    assert found.places == (0,) * 6 + (1,) * 6 + ("cpu",) * 5 + ("disk",) * 3


def test_parts_pass_through_where_blocks_would_cost_transfers():
    units = [unit(10, part=3) for _ in range(20)]
    moved = {budget: assign(units, {0: budget}).moved_bytes for budget in (2, 3, 12, 13, 23, 199, 200)}
    assert moved == {2: 200, 3: 200, 12: 200, 13: 190, 23: 180, 199: 10, 200: 0}
    assert not assign(units, {0: 2}).can_run


def test_the_ring_takes_what_is_left_up_to_two_whole_groups():
    units = [unit(10, part=3) for _ in range(20)]
    rings = {budget: (assign(units, {0: budget}).reserve_bytes, assign(units, {0: budget}).slots) for budget in (12, 13, 19, 22)}
    assert rings == {12: (12, 1), 13: (3, 0), 19: (9, 0), 22: (12, 1)}


def test_a_roomier_ring_is_taken_where_it_costs_nothing():
    # Either of the two may be offloaded; both move 12 bytes.
    units = [unit(6, part=6), unit(6, part=1), unit(6, part=6), unit(10, part=1)]
    found = assign(units, {0: 22})
    assert found.moved_bytes == min(least_moved(units, [22], 0), 28)
    assert found.is_optimal


def test_what_runs_elsewhere_gives_its_state_back():
    units = [unit(10, state=5, part=2) for _ in range(10)]
    # 4 on the second device; the first one keeps the state of the other 6, 30 bytes, the ring of 2, and 2 blocks' weights.
    found = assign(units, {0: 52, 1: 60})
    assert found.moved_bytes == 40
    assert found.places.count(1) == 4
    assert found.places.count(0) == 2
    assert found.is_optimal


def test_cpu_computes_where_there_is_no_accelerator():
    found = assign([unit(10) for _ in range(20)], {"cpu": 70})
    assert found.main == "cpu"
    assert found.places == ("cpu",) * 6 + ("disk",) * 14
    assert (found.slots, found.reserve_bytes) == (1, 10)


def test_an_accelerator_too_small_for_any_block_is_left_out():
    found = assign([unit(10) for _ in range(3)], {0: 9, "cpu": 100})
    assert found.main == "cpu"
    assert set(found.places) == {"cpu"}


def test_the_first_accelerator_may_be_too_small_to_be_the_main_one():
    found = assign([unit(10) for _ in range(20)], {0: 9, 1: 60, "cpu": 500})
    assert found.main == 1
    assert found.moved_bytes == 150


def test_what_reads_single_rows_is_offloaded_first_and_needs_no_room():
    units = [unit(50, rows_only=True), *(unit(10) for _ in range(10))]
    found = assign(units, {0: 100, "cpu": 1000})
    assert found.places == ("cpu",) + (0,) * 10
    assert found.moved_bytes == found.reserve_bytes == 0
    assert assign(units, {0: 150, "cpu": 1000}).places == (0,) * 11


def test_buffers_that_stay_are_charged_to_the_main_device():
    units = [unit(10, staying=4) for _ in range(20)]
    found = assign(units, {0: 100, "cpu": 1000})
    assert found.places.count(0) == 2  # 20 × 4 stay, 6 pass through, 14 are left: two more blocks of 6
    assert found.moved_bytes == 18 * 6


def test_faster_store_is_filled_as_far_as_it_goes():
    found = assign([unit(7), unit(5), unit(5), *(unit(1) for _ in range(2))], {0: 7, "cpu": 10, "disk": 100})
    assert sum(size for size, place in zip((7, 5, 5, 1, 1), found.places, strict=True) if place == "cpu") <= 10
    assert "disk" in found.places


def test_a_main_device_that_has_to_be_seen_in_the_map_holds_something():
    units = [unit(50, part=12), unit(10), unit(9)]
    assert assign(units, {0: 13, 1: 20}).main == 0
    found = assign(units, {0: 13, 1: 22, "cpu": 100}, main_holds=True)
    assert (found.main, found.moved_bytes) == (1, 50)
    assert assign([*units, unit(1)], {0: 13, 1: 20, "cpu": 100}, main_holds=True).places == ("cpu", 1, 1, 0)
