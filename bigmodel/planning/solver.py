"""The assignment of units to devices: as few bytes moved per step as the budgets allow, then in order, then balanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..devices import DeviceKey
from .items import Unit
from .knapsack import Kind, pack
from .resident import Tier, alike, all_resident, deal, limit_bytes

__all__ = ["Assignment", "assign", "is_better", "ring_bytes", "solve"]

NO_LIMIT = 1 << 50
SUBPROBLEM_LIMIT = 48
"""Choices of the largest offloaded groups that are solved in full, the most promising first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where each unit lives. `places[i]` is the device of unit i, `main` where everything offloaded runs."""

    places: tuple[DeviceKey, ...]
    main: DeviceKey
    slots: int
    """Groups that can pass through at a time: 2, 1, or 0 when nothing has to."""
    reserve_bytes: int
    moved_bytes: int
    is_optimal: bool
    """Whether it is proven that no assignment with this ring moves fewer bytes."""
    unplaced: tuple[int, ...] = ()
    """Units that no device has room for."""


def ring_bytes(units: Sequence[Unit], slots: int) -> int:
    """Room that the largest `slots` groups of these units need. The order of execution is not known yet: any two may follow each other."""
    return sum(sorted((slot for unit in units for slot in unit.slot_bytes), reverse=True)[:slots])


def assign(
    units: Sequence[Unit],
    budgets: Mapping[DeviceKey, int],
    *,
    mode: str = "sequential",
    main_holds: bool = False,
    overlap_first: bool | None = None,
    workspace_bytes: int = 0,
) -> Assignment:
    """Places every unit within `budgets` (bytes, in device order; "disk" has no limit unless one is given).

    Arithmetic happens on the accelerators, and what they cannot keep rests on "cpu", then on "disk". Without accelerators, or where none of
    them has room for the model's groups to pass through, "cpu" computes and "disk" is the store. If even that fails, everything rests in
    the stores and `slots` is 0 with `moved_bytes` above 0. Every device that computes keeps `workspace_bytes` free. `mode`, `main_holds`
    and `overlap_first` as in `solve`.
    """
    accelerators = [
        Tier(key, budget - workspace_bytes) for key, budget in budgets.items() if key not in ("cpu", "disk") and budget > workspace_bytes
    ]
    host = [Tier("cpu", budgets["cpu"])] if budgets.get("cpu", 0) > 0 else []
    disk = [Tier("disk", budgets.get("disk"))]
    found = (
        solve(units, accelerators, [*host, *disk], mode=mode, main_holds=main_holds, overlap_first=overlap_first) if accelerators else None
    )
    if found is None and budgets.get("cpu", 0) > workspace_bytes:
        found = solve(units, [Tier("cpu", budgets["cpu"] - workspace_bytes)], disk, overlap_first=overlap_first)
    if found is not None:
        return found
    places: list[DeviceKey | None] = [None] * len(units)
    unplaced = store_offloaded(units, places, [*host, *disk])
    moved = sum(unit.moved_bytes for unit, place in zip(units, places, strict=True) if place != "cpu")
    return Assignment(
        tuple("disk" if place is None else place for place in places), "cpu", 0, 0, moved, is_optimal=False, unplaced=unplaced
    )


def solve(
    units: Sequence[Unit],
    compute: Sequence[Tier],
    stores: Sequence[Tier],
    *,
    mode: str = "sequential",
    main_holds: bool = False,
    overlap_first: bool | None = None,
) -> Assignment | None:
    """Places every unit on one of the `compute` devices, or offloads it to one of the `stores`, in device order.

    Everything stays on the compute devices if it can be packed there; no reserve is kept then. Otherwise one of them is the main device,
    keeps room for two offloaded groups to pass through (the one in use and the next one), and as few bytes as possible travel per step.
    Only where no device has enough for that (`room_for_two`) is one slot used; a budget that grows beyond that point buys the second slot
    first, and what one slot could keep is never given up for it, so that more budget never offloads more. In a model of few large groups
    (`second_slot_costs_much`, unless `overlap_first` tells) the second slot is only taken if it costs nothing.

    Which groups are the largest offloaded ones is tried in all combinations (up to `SUBPROBLEM_LIMIT`), each a packing problem
    (`knapsack.pack`): exact for few units or many equal ones, and `is_optimal` says whether it is proven. Equal units are dealt to the
    devices in model order. `mode` tells how what fits is spread ("sequential", "balanced", "balanced_low_0"). With `main_holds` the main
    device keeps at least one unit, so that it can be recognized in the map. None if the compute devices cannot run the model: none of them
    has room for its groups to pass through.
    """
    resident = all_resident(units, compute, mode)
    if resident is not None:
        return Assignment(tuple(resident), compute[0].key, 0, 0, 0, is_optimal=True)
    overlap_first = not second_slot_costs_much(units) if overlap_first is None else overlap_first
    enough = room_for_two(units) - 1 if overlap_first else NO_LIMIT
    best: Assignment | None = None
    for slots, most in ((2, NO_LIMIT), (1, enough)):
        limits = [min(limit_bytes(tier), most) for tier in compute]
        tried = {0}
        for main, limit in enumerate(limits):
            if limit in tried:  # equal devices do equally well, and the first of them is the one that people expect
                continue
            tried.add(limit)
            positions, is_optimal = _partly_resident(units, limits, main, slots)
            if positions is None:
                continue
            found = _finish(units, compute, stores, main, slots, positions, is_optimal=is_optimal)
            if main_holds and found.main not in found.places:
                continue
            if best is None or is_better(found, best, units):
                best = found
    return best


def _typical_bytes(slots: Sequence[int]) -> int:
    """The size up to which groups hold half of all bytes."""
    seen_bytes, total_bytes = 0, sum(slots)
    for slot in sorted(slots):
        seen_bytes += slot
        if 2 * seen_bytes >= total_bytes:
            return slot
    return 0


def second_slot_costs_much(units: Sequence[Unit]) -> bool:
    """Whether a typical group is a tenth or more of all that can travel: then keeping it saves more than overlap does."""
    slots = [unit.slot_bytes[0] for unit in units if unit.slot_bytes]
    return 10 * _typical_bytes(slots) >= sum(slots)


def room_for_two(units: Sequence[Unit]) -> int:
    """The budget of a main device from which on two slots are worth their room: both, and what is too large to pass through a typical one.

    Groups of twice the typical size or more (heads, tied embeddings) are kept rather than given two slots of their size.
    """
    slots = [unit.slot_bytes[0] for unit in units if unit.slot_bytes]
    typical_bytes = _typical_bytes(slots)
    outsized = [slot for slot in slots if slot >= 2 * typical_bytes]
    regular = sorted(slot for slot in slots if slot < 2 * typical_bytes)
    return sum(outsized) + sum(regular[-2:]) + sum(unit.staying_bytes for unit in units)


def is_better(first: Assignment, second: Assignment, units: Sequence[Unit]) -> bool:
    """Whether the first moves fewer bytes per step than the second, or as many and fewer of them from disk."""

    def cost(assignment: Assignment) -> tuple[int, int, int]:
        from_disk = sum(unit.moved_bytes for unit, place in zip(units, assignment.places, strict=True) if place == "disk")
        return len(assignment.unplaced), assignment.moved_bytes, from_disk

    return cost(first) < cost(second)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Offload nothing larger than `threshold`, except one unit of the kind `special`."""

    ring_bytes: int
    threshold: int
    special: int | None


def _partly_resident(units: Sequence[Unit], limits: Sequence[int], main: int, slots: int) -> tuple[list[int | None] | None, bool]:
    """The device of each unit (None: offloaded) so that the fewest bytes move with this main device and ring, and whether that is proven.

    None for all of it if no ring fits.
    """
    # The buffers of all units are charged to the main device, as though all were offloaded; there they then cost nothing more.
    main_room = limits[main] - sum(unit.staying_bytes for unit in units)
    other_limits = [limit for position, limit in enumerate(limits) if position != main]
    movers = [index for index, unit in enumerate(units) if unit.moved_bytes]
    kinds, rows = alike([(units[i].stored_bytes, units[i].total_bytes, units[i].moved_bytes, units[i].slot_bytes) for i in movers])
    members = [[movers[row] for row in group] for group in rows]
    moved_in_all = sum(units[index].moved_bytes for index in movers)

    best_value, best_counts, bound_value = -1, None, -1
    for number, choice in enumerate(_choices(kinds, slots, main_room)):
        if number == SUBPROBLEM_LIMIT:
            bound_value = moved_in_all
            break
        required = [
            0 if not slot or slot[0] <= choice.threshold else len(group) - (index == choice.special)
            for index, ((_, _, _, slot), group) in enumerate(zip(kinds, members, strict=True))
        ]
        problem = [
            Kind(first, other, value, len(group), must)
            for (first, other, value, _), group, must in zip(kinds, members, required, strict=True)
        ]
        room = [main_room - choice.ring_bytes, *other_limits]
        if sum(kind.required * min(kind.first_weight, kind.weight) for kind in problem) > sum(room):
            continue
        if best_value >= 0 and sum(room) < best_value and all(kind.value <= min(kind.first_weight, kind.weight) for kind in problem):
            continue
        packing = pack(problem, room, worth_more_than=best_value)
        if packing is not None:
            best_value, best_counts = packing.value, packing.counts
            bound_value = max(bound_value, packing.bound)
    if best_counts is None:
        return None, False
    order = [main, *(position for position in range(len(limits)) if position != main)]
    dealt = deal(best_counts, members, len(units))
    return [None if position is None else order[position] for position in dealt], best_value >= bound_value


def _choices(
    kinds: Sequence[tuple[int, int, int, tuple[int, ...]]],
    slots: int,
    main_room: int,
) -> list[_Choice]:
    """All rings that could be needed, the smallest first; of those with the same kinds offloaded only the smallest."""
    levels = sorted({0, *(size for *_, slot in kinds for size in slot)})
    choices: dict[tuple[int, int | None], _Choice] = {}
    for threshold in levels:
        choices[threshold, None] = _Choice(slots * threshold, threshold, None)
        if slots == 1:
            continue
        for index, (*_, slot) in enumerate(kinds):
            if slot and slot[0] > threshold and all(size <= threshold for size in slot[1:]):
                choices[threshold, index] = _Choice(slot[0] + threshold, threshold, index)
    return sorted((choice for choice in choices.values() if choice.ring_bytes <= main_room), key=lambda choice: choice.ring_bytes)


def _finish(
    units: Sequence[Unit],
    compute: Sequence[Tier],
    stores: Sequence[Tier],
    main: int,
    slots: int,
    positions: list[int | None],
    *,
    is_optimal: bool,
) -> Assignment:
    """What moves nothing goes where room is left, the rest to the stores; contiguous if that costs nothing."""
    offloaded = [unit for unit, position in zip(units, positions, strict=True) if position is None and unit.moved_bytes]
    reserve = ring_bytes(offloaded, slots)
    room = [limit_bytes(tier) for tier in compute]
    room[main] -= reserve + sum(unit.staying_bytes for unit in units)

    def weight(unit: Unit, position: int) -> int:
        return unit.stored_bytes if position == main else unit.total_bytes

    for unit, position in zip(units, positions, strict=True):
        if position is not None:
            room[position] -= weight(unit, position)
    for index, unit in enumerate(units):
        if positions[index] is None and not unit.moved_bytes:
            found = next((position for position in [main, *range(len(room))] if weight(unit, position) <= room[position]), None)
            if found is not None:
                positions[index] = found
                room[found] -= weight(unit, found)
    places: list[DeviceKey | None] = [None if position is None else compute[position].key for position in positions]
    unplaced = store_offloaded(units, places, stores)
    return Assignment(
        tuple("disk" if place is None else place for place in places),
        compute[main].key,
        min(slots, sum(len(unit.slot_bytes) for unit in offloaded)),
        reserve,
        sum(unit.moved_bytes for unit in offloaded),
        is_optimal,
        unplaced,
    )


def store_offloaded(units: Sequence[Unit], places: list[DeviceKey | None], stores: Sequence[Tier]) -> tuple[int, ...]:
    """Gives every unit without a place one of the stores, the faster first, filled as far as they go. Returns those that fit nowhere."""
    for store in stores:
        open_units = [index for index, place in enumerate(places) if place is None]
        sizes = [units[index].stored_bytes for index in open_units]
        if sum(sizes) <= limit_bytes(store):
            chosen = open_units
        else:
            values = [max(1, units[index].moved_bytes) for index in open_units]
            kinds, members = alike(list(zip(sizes, sizes, values, strict=True)))
            packing = pack(
                [Kind(size, size, value, len(rows)) for (size, _, value), rows in zip(kinds, members, strict=True)], [limit_bytes(store)]
            )
            rows = (
                [] if packing is None else [row for row, position in enumerate(deal(packing.counts, members, len(sizes))) if position == 0]
            )
            chosen = [open_units[row] for row in rows]
        for index in chosen:
            places[index] = store.key
    return tuple(index for index, place in enumerate(places) if place is None)
