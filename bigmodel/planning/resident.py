"""Every unit on a compute device, if it can be done: in order, balanced or filled, else packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..devices import DeviceKey
from .items import Unit
from .knapsack import Kind, pack

__all__ = ["Tier", "alike", "all_resident", "deal", "limit_bytes"]


@dataclass(frozen=True, slots=True)
class Tier:
    """A device and what it offers to the plan (bytes; None: without limit)."""

    key: DeviceKey
    budget_bytes: int | None


def limit_bytes(tier: Tier) -> int:
    """What the tier offers as a number, a very large one where there is no limit."""
    return 1 << 50 if tier.budget_bytes is None else tier.budget_bytes


def all_resident(units: Sequence[Unit], compute: Sequence[Tier], mode: str) -> list[DeviceKey] | None:
    limits = [limit_bytes(tier) for tier in compute]
    sizes = [unit.total_bytes for unit in units]
    if not limits or sum(sizes) > sum(limits):
        return None
    positions = _in_order(sizes, _balanced_limits(sizes, limits, mode))
    if positions is None:
        positions = _filled_later(sizes, limits)
    if positions is None:
        kinds, members = alike([(size, size, 1) for size in sizes])
        packing = pack([Kind(weight, weight, 1, len(rows), len(rows)) for (weight, _, _), rows in zip(kinds, members, strict=True)], limits)
        positions = None if packing is None else deal(packing.counts, members, len(sizes))
    return None if positions is None else [compute[position].key for position in positions if position is not None]


def _in_order(sizes: Sequence[int], limits: Sequence[int]) -> list[int | None] | None:
    """The devices filled one after the other, never going back; None if that leaves something over."""
    positions: list[int | None] = []
    position, used = 0, 0
    for size in sizes:
        while used + size > limits[position]:
            position, used = position + 1, 0
            if position == len(limits):
                return None
        positions.append(position)
        used += size
    return positions


def _filled_later(sizes: Sequence[int], limits: Sequence[int]) -> list[int | None] | None:
    """Each unit on the first device that has room for it; None if one has none."""
    room = list(limits)
    positions: list[int | None] = []
    for size in sizes:
        position = next((position for position, left in enumerate(room) if size <= left), None)
        if position is None:
            return None
        room[position] -= size
        positions.append(position)
    return positions


def _balanced_limits(sizes: Sequence[int], limits: list[int], mode: str) -> list[int]:
    """The limits lowered to the smallest level at which the units still fit in order; the first device's own level for `balanced_low_0`."""
    if mode == "sequential" or len(limits) == 1:
        return limits

    def lowest(make: list[tuple[int, int]]) -> list[int]:
        """The lowest level in [0, largest limit] for the devices of `make` (position, limit) that fits everything in order."""
        low, high = 0, max(sizes, default=0) + sum(sizes)
        while low < high:
            level = (low + high) // 2
            if _in_order(sizes, lowered(level, make)) is None:
                low = level + 1
            else:
                high = level
        return lowered(low, make)

    def lowered(level: int, make: list[tuple[int, int]]) -> list[int]:
        changed = list(base)
        for position, limit in make:
            changed[position] = min(level, limit)
        return changed

    base = list(limits)
    if _in_order(sizes, base) is None:
        return limits
    if mode == "balanced_low_0":
        base = lowest([(0, limits[0])])
        return lowest([(position, limit) for position, limit in enumerate(limits) if position])
    return lowest(list(enumerate(limits)))


def alike(properties: Sequence[tuple]) -> tuple[list[tuple], list[list[int]]]:
    """Distinct properties in order of appearance, and the rows that have them."""
    groups: dict[tuple, list[int]] = {}
    for row, values in enumerate(properties):
        groups.setdefault(values, []).append(row)
    return list(groups), list(groups.values())


def deal(counts: Sequence[Sequence[int]], members: Sequence[Sequence[int]], rows: int) -> list[int | None]:
    """Of each kind the first ones to the first device, the next ones to the second, and so on; None for those that are left."""
    positions: list[int | None] = [None] * rows
    for kind, group in enumerate(members):
        start = 0
        for position, row in enumerate(counts):
            for index in group[start : start + row[kind]]:
                positions[index] = position
            start += row[kind]
    return positions
