"""The assignment of units to devices: as few bytes moved per step as the budgets allow, then in order, then balanced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from ..devices import DeviceKey
from .items import Unit
from .knapsack import Effort, Kind, pack
from .resident import Tier, alike, all_resident, deal, limit_bytes

__all__ = ["Assignment", "assign", "is_better", "least_ring_bytes", "ring_bytes", "solve", "whole_groups"]

SUBPROBLEM_LIMIT = 48
"""Choices of the largest offloaded groups that are solved in full, the most promising first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where each unit lives. `places[i]` is the device of unit i, `main` where everything offloaded runs."""

    places: tuple[DeviceKey, ...]
    main: DeviceKey
    slots: int
    """Whole groups that the reserve has room for: 2, 1, or 0 when they pass through in parts, or nothing has to."""
    reserve_bytes: int
    moved_bytes: int
    is_optimal: bool
    """Whether it is proven that no assignment moves fewer bytes."""
    unplaced: tuple[int, ...] = ()
    """Units that no device has room for."""
    can_run: bool = True
    """Whether the main device has room for what stays there, and for what passes through."""


def ring_bytes(units: Iterable[Unit], slots: int) -> int:
    """Room that the largest `slots` groups of these units need. The order of execution is not known yet: any two may follow each other."""
    return sum(sorted((slot for unit in units for slot in unit.slot_bytes), reverse=True)[:slots])


def least_ring_bytes(units: Iterable[Unit]) -> int:
    """Room without which these units cannot pass through: for their largest part."""
    return max((unit.part_bytes for unit in units), default=0)


def assign(
    units: Sequence[Unit],
    budgets: Mapping[DeviceKey, int],
    *,
    mode: str = "sequential",
    main_holds: bool = False,
    workspace_bytes: int = 0,
) -> Assignment:
    """Places every unit within `budgets` (bytes, in device order; "disk" has no limit unless one is given).

    Arithmetic happens on the accelerators, and what they cannot keep rests on "cpu", then on "disk". Without accelerators, or where none of
    them has room for the model's groups to pass through, "cpu" computes and "disk" is the store. If even that fails, everything rests in
    the stores and `can_run` is False. Every device that computes keeps `workspace_bytes` free. `mode` and `main_holds` as in
    `solve`.
    """
    accelerators = [
        Tier(key, budget - workspace_bytes) for key, budget in budgets.items() if key not in ("cpu", "disk") and budget > workspace_bytes
    ]
    host = [Tier("cpu", budgets["cpu"])] if budgets.get("cpu", 0) > 0 else []
    disk = [Tier("disk", budgets.get("disk"))]
    found = solve(units, accelerators, [*host, *disk], mode=mode, main_holds=main_holds)
    if found is None and budgets.get("cpu", 0) > workspace_bytes:
        found = solve(units, [Tier("cpu", budgets["cpu"] - workspace_bytes)], disk)
    if found is not None:
        return found
    places: list[DeviceKey | None] = [None] * len(units)
    unplaced = store_offloaded(units, places, [*host, *disk])
    moved = sum(unit.moved_bytes for unit, place in zip(units, places, strict=True) if place != "cpu")
    return Assignment(
        tuple("disk" if place is None else place for place in places),
        "cpu",
        0,
        0,
        moved,
        is_optimal=False,
        unplaced=unplaced,
        can_run=False,
    )


def solve(
    units: Sequence[Unit],
    compute: Sequence[Tier],
    stores: Sequence[Tier],
    *,
    mode: str = "sequential",
    main_holds: bool = False,
) -> Assignment | None:
    """Places every unit on one of the `compute` devices, or offloads it to one of the `stores`, in device order.

    Everything stays on the compute devices if it can be packed there; no reserve is kept then. Otherwise one of them is the main device,
    where what is offloaded passes through a ring, and as few bytes as possible travel per step. The least ring holds the largest part of
    an offloaded group (`Unit.part_bytes`): whatever any map needs, so that no map within the budgets moves fewer bytes. Of the
    assignments that move as few on the same main device, one with a roomier ring is taken: two whole groups, which lets copies and
    arithmetic overlap, or one; and room that is left on the main device in the end goes to the ring as well, up to two groups.

    Why it is optimal: what has to be known of the ring is the largest part that is offloaded. All sizes that this can have are tried (up
    to `SUBPROBLEM_LIMIT` of them, the smallest first), and each is a packing problem (`knapsack.pack`), exact for few units or many equal
    ones, with a bound where it is not; likewise all main devices that differ. `is_optimal` says whether it is proven for this answer.
    Where it is, more budget never moves more bytes. Equal units are dealt to the devices in model order.

    `mode` tells how what fits is spread ("sequential", "balanced", "balanced_low_0"). With `main_holds` the main device keeps at least one
    unit, so that it can be recognized in the map. None if the compute devices cannot run the model: none of them has room for its groups
    to pass through.
    """
    resident = all_resident(units, compute, mode)
    if resident is not None:
        return Assignment(tuple(resident), compute[0].key, 0, 0, 0, is_optimal=True)
    effort = Effort()
    movers = _movers(units, is_alone=len(compute) == 1)
    best = _best_with(units, movers, compute, stores, Ring.PART, effort, main_holds=main_holds)
    if best is None or best.slots == 2:
        return best
    for ring in (Ring.TWO_GROUPS, Ring.ONE_GROUP):
        roomier = _best_with(units, movers, compute, stores, ring, effort, main_holds=main_holds, at_most=best)
        if roomier is not None:
            return replace(roomier, is_optimal=best.is_optimal)
    return best


class Ring(Enum):
    """What the ring has to hold."""

    PART = 0
    """The largest part of an offloaded group."""
    ONE_GROUP = 1
    TWO_GROUPS = 2


def _best_with(
    units: Sequence[Unit],
    movers: _Movers,
    compute: Sequence[Tier],
    stores: Sequence[Tier],
    ring: Ring,
    effort: Effort,
    *,
    main_holds: bool,
    at_most: Assignment | None = None,
) -> Assignment | None:
    """The best assignment with such a ring, over all main devices, or that of `at_most`; None if there is none, or none as good as that."""
    limits = [limit_bytes(tier) for tier in compute]
    best = None
    tried = set()
    is_optimal = True
    for main, limit in enumerate(limits):
        # Equal devices do equally well, and the first of them is the one that people expect.
        if limit in tried or (at_most is not None and compute[main].key != at_most.main):
            continue
        tried.add(limit)
        goal = best or at_most
        positions, is_proven = _partly_resident(units, movers, limits, main, ring, effort, None if goal is None else goal.moved_bytes)
        is_optimal = is_optimal and is_proven
        if positions is None:
            continue
        found = _finish(units, compute, stores, main, positions)
        if main_holds and found.main not in found.places:
            continue
        if (best is None or is_better(found, best, units)) and (at_most is None or not is_better(at_most, found, units)):
            best = found
    return None if best is None else replace(best, is_optimal=is_optimal)


def is_better(first: Assignment, second: Assignment, units: Sequence[Unit]) -> bool:
    """Whether the first moves fewer bytes per step than the second, or as many and fewer of them from disk; accelerators before the CPU."""

    def cost(assignment: Assignment) -> tuple[int, bool, int, int]:
        from_disk = sum(unit.moved_bytes for unit, place in zip(units, assignment.places, strict=True) if place == "disk")
        return len(assignment.unplaced), assignment.main == "cpu", assignment.moved_bytes, from_disk

    return cost(first) < cost(second)


class _Mover(NamedTuple):
    """What matters of a unit to the packing: units that agree in it are alike."""

    stored_bytes: int
    total_bytes: int
    moved_bytes: int
    part_bytes: int
    slot_bytes: tuple[int, ...]

    def needs(self, ring: Ring) -> tuple[int, ...]:
        """Room that it needs in such a ring, the larger group first."""
        return (self.part_bytes,) if ring is Ring.PART else self.slot_bytes or (0,)


@dataclass(frozen=True, slots=True)
class _Movers:
    """The units that a packing is about."""

    kinds: list[_Mover]
    members: list[list[int]]
    """Of each kind the units, by position."""
    moved_bytes: int
    staying_bytes: int
    """What stays on the main device if all units are offloaded, these and all others."""


def _movers(units: Sequence[Unit], *, is_alone: bool) -> _Movers:
    # What moves nothing but has something that stays is worth a place elsewhere for the room that this gives back.
    movers = [index for index, unit in enumerate(units) if unit.moved_bytes or (not is_alone and unit.staying_bytes)]
    properties = [
        (unit.total_bytes - unit.staying_bytes, unit.total_bytes, unit.moved_bytes, unit.part_bytes, unit.slot_bytes)
        for unit in (units[index] for index in movers)
    ]
    found, rows = alike(properties)
    return _Movers(
        [_Mover(*kind) for kind in found],
        [[movers[row] for row in group] for group in rows],
        sum(unit.moved_bytes for unit in units),
        sum(unit.staying_bytes for unit in units),
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """Offload nothing larger than `threshold`, except one unit of the kind `special`."""

    ring_bytes: int
    threshold: int
    special: int | None


def _partly_resident(
    units: Sequence[Unit], movers: _Movers, limits: Sequence[int], main: int, ring: Ring, effort: Effort, at_most: int | None
) -> tuple[list[int | None] | None, bool]:
    """The device of each unit (None: offloaded) so that the fewest bytes move with this main device and ring, and whether that is proven.

    None for all of it if no ring fits, or if more than `at_most` bytes would move.
    """
    # What stays of all units is charged to the main device, as though all were offloaded. A unit on the main device costs only the rest
    # there, and one that lives elsewhere gives its share back (`Kind.relief`).
    kinds, members, moved_in_all = movers.kinds, movers.members, movers.moved_bytes
    main_room = limits[main] - movers.staying_bytes
    other_limits = [limit for position, limit in enumerate(limits) if position != main]

    best_value = -1 if at_most is None else moved_in_all - at_most - 1
    best_counts, bound_value = None, best_value
    relief = movers.staying_bytes if other_limits else 0
    for number, choice in enumerate(_choices(kinds, ring, main_room + relief)):
        if number == SUBPROBLEM_LIMIT:
            bound_value = moved_in_all
            break
        required = [
            0 if kind.needs(ring)[0] <= choice.threshold else len(group) - (index == choice.special)
            for index, (kind, group) in enumerate(zip(kinds, members, strict=True))
        ]
        problem = [
            Kind(kind.stored_bytes, kind.total_bytes, kind.moved_bytes, len(group), must, kind.total_bytes - kind.stored_bytes)
            for kind, group, must in zip(kinds, members, required, strict=True)
        ]
        room = [main_room - choice.ring_bytes, *other_limits]
        if sum(kind.required * kind.first_weight for kind in problem) > sum(room):
            continue
        if best_value >= 0 and sum(room) < best_value and all(kind.value <= kind.first_weight for kind in problem):
            continue
        packing = pack(problem, room, worth_more_than=best_value, effort=effort)
        if packing is not None:
            best_value, best_counts = packing.value, packing.counts
            bound_value = max(bound_value, packing.bound)
        elif effort.was_cut_off:
            bound_value = moved_in_all
    if best_counts is None:
        return None, bound_value <= best_value
    order = [main, *(position for position in range(len(limits)) if position != main)]
    dealt = deal(best_counts, members, len(units))
    return [None if position is None else order[position] for position in dealt], best_value >= bound_value


def _choices(kinds: Sequence[_Mover], ring: Ring, main_room: int) -> list[_Choice]:
    """All rings that could be needed, the smallest first; of those with the same kinds offloaded only the smallest."""
    needs = [kind.needs(ring) for kind in kinds]
    levels = sorted({0, *(size for sizes in needs for size in sizes)})
    choices: dict[tuple[int, int | None], _Choice] = {}
    for threshold in levels:
        choices[threshold, None] = _Choice((2 if ring is Ring.TWO_GROUPS else 1) * threshold, threshold, None)
        if ring is not Ring.TWO_GROUPS:
            continue
        for index, sizes in enumerate(needs):
            if sizes[0] > threshold and all(size <= threshold for size in sizes[1:]):
                choices[threshold, index] = _Choice(sizes[0] + threshold, threshold, index)
    return sorted((choice for choice in choices.values() if choice.ring_bytes <= main_room), key=lambda choice: choice.ring_bytes)


def _finish(
    units: Sequence[Unit],
    compute: Sequence[Tier],
    stores: Sequence[Tier],
    main: int,
    positions: list[int | None],
) -> Assignment:
    """What is left on the main device goes to the ring, then what moves nothing goes where room is left, and the rest to the stores."""
    offloaded = [unit for unit, position in zip(units, positions, strict=True) if position is None and unit.moved_bytes]
    room = [limit_bytes(tier) for tier in compute]
    for unit, position in zip(units, positions, strict=True):
        room[main if position is None else position] -= unit.staying_bytes if position is None else unit.total_bytes
    reserve = max(least_ring_bytes(offloaded), min(room[main], ring_bytes(offloaded, 2)))
    room[main] -= reserve
    for index, unit in enumerate(units):
        if positions[index] is None and not unit.moved_bytes:
            needed = {position: unit.stored_bytes if position == main else unit.total_bytes for position in [main, *range(len(room))]}
            found = next((position for position, nbytes in needed.items() if nbytes <= room[position]), None)
            if found is not None:
                positions[index] = found
                room[found] -= needed[found]
                room[main] += 0 if found == main else unit.staying_bytes
    places: list[DeviceKey | None] = [None if position is None else compute[position].key for position in positions]
    unplaced = store_offloaded(units, places, stores)
    return Assignment(
        tuple("disk" if place is None else place for place in places),
        compute[main].key,
        whole_groups(offloaded, reserve),
        reserve,
        sum(unit.moved_bytes for unit in offloaded),
        is_optimal=False,
        unplaced=unplaced,
    )


def whole_groups(offloaded: Sequence[Unit], reserve_bytes: int) -> int:
    """How many of the largest groups the reserve holds, up to two."""
    groups = sum(len(unit.slot_bytes) for unit in offloaded)
    return max((number for number in (1, 2) if number <= groups and ring_bytes(offloaded, number) <= reserve_bytes), default=0)


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
