"""Filling devices with the units that save the most: several knapsacks, many equal units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Effort", "Kind", "Packing", "pack"]

STATE_LIMIT = 4096
"""Partial fillings kept at a time; beyond it the best of each 1/4096 of the capacity stays."""
NODE_LIMIT = 20_000
"""Steps of all exhaustive searches for one answer before they settle for the best that they have found."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """Units that are alike for the packing."""

    first_weight: int
    """Bytes that one takes on the first bin."""
    weight: int
    """Bytes that one takes on any other bin."""
    value: int
    """What it saves to have one packed."""
    count: int
    required: int = 0
    """How many have to be packed."""
    relief: int = 0
    """Room that the first bin gains when one is packed on any other: what was charged there as though none were."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`counts[bin][kind]` units, what they save in all, and the most that any packing could save."""

    counts: tuple[tuple[int, ...], ...]
    value: int
    bound: int

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven that nothing saves more."""
        return self.value >= self.bound


@dataclass(slots=True)
class Effort:
    """Steps that exhaustive searches may still take; shared by the packings of one question."""

    nodes: int = NODE_LIMIT
    was_cut_off: bool = False
    """Whether the last search ended before it had tried everything."""


class _Frontier:
    """All fillings of one bin that are worth having: heavier only if also worth more."""

    def __init__(self, weights: Sequence[int], values: Sequence[int], counts: Sequence[int], capacity: int) -> None:
        self.exact = True
        self.kinds = len(weights)
        self.stages: list[tuple[Numbers, Numbers]] = [(np.zeros(1, np.int64), np.zeros(1, np.int64))]
        self.pieces: list[tuple[int, int, int, int]] = []  # kind, how many of it at once, weight, value
        for kind, count in enumerate(counts):
            left = min(count, capacity // weights[kind]) if weights[kind] else count
            multiple = 1
            while left > 0:
                taken = min(multiple, left)
                self._add(kind, taken, taken * weights[kind], taken * values[kind], capacity)
                left -= taken
                multiple *= 2

    def _add(self, kind: int, taken: int, weight: int, value: int, capacity: int) -> None:
        old_weights, old_values = self.stages[-1]
        weights = np.concatenate([old_weights, old_weights + weight])
        values = np.concatenate([old_values, old_values + value])
        fits = weights <= capacity
        weights, values = weights[fits], values[fits]
        order = np.lexsort((-values, weights))
        weights, values = weights[order], values[order]
        better = np.ones(len(values), bool)
        better[1:] = values[1:] > np.maximum.accumulate(values)[:-1]
        weights, values = weights[better], values[better]
        if len(weights) > STATE_LIMIT:
            self.exact = False
            bucket = (weights.astype(np.float64) * (STATE_LIMIT / capacity)).astype(np.int64)
            last_of_bucket = np.append(bucket[1:] != bucket[:-1], True)
            weights, values = weights[last_of_bucket], values[last_of_bucket]
        self.stages.append((weights, values))
        self.pieces.append((kind, taken, weight, value))

    def best_value(self, capacity: int) -> int:
        weights, values = self.stages[-1]
        return int(values[np.searchsorted(weights, capacity, side="right") - 1])

    def best_counts(self) -> list[int]:
        """The most valuable filling, as units of each kind."""
        counts = [0] * self.kinds
        weight, value = (int(column[-1]) for column in self.stages[-1])
        for (kind, taken, piece_weight, piece_value), (weights, values) in zip(
            reversed(self.pieces), reversed(self.stages[:-1]), strict=True
        ):
            position = int(np.searchsorted(weights, weight))
            if position < len(weights) and weights[position] == weight and values[position] == value:
                continue
            counts[kind] += taken
            weight -= piece_weight
            value -= piece_value
        return counts


@dataclass(slots=True)
class _Search:
    """Depth-first over the units, largest first: on which bin, or nowhere; equal units and equal bins in one order only."""

    kinds: Sequence[Kind]
    capacities: list[int]
    best_value: int
    bound: int
    effort: Effort
    best: list[list[int]] | None = None
    units: list[int] = field(default_factory=list)
    value_after: list[int] = field(default_factory=list)
    relief_after: list[int] = field(default_factory=list)
    optional: list[int] = field(default_factory=list)
    density: float = 0.0

    def run(self) -> bool:
        """Whether the search was complete."""
        by_size = sorted(range(len(self.kinds)), key=lambda kind: -self.kinds[kind].weight)
        self.units = [kind for kind in by_size for _ in range(self.kinds[kind].count)]
        if len(self.units) > 400:  # deeper than Python likes to recurse, and far beyond what can be searched
            return False
        self.optional = [kind.count - kind.required for kind in self.kinds]
        # A unit on another bin takes its weight there and gives its relief to the first: both are room.
        self.density = max((kind.value / max(1, min(kind.first_weight, kind.weight - kind.relief)) for kind in self.kinds), default=0.0)
        self.value_after, self.relief_after = [0], [0]
        for kind in reversed(self.units):
            self.value_after.append(self.value_after[-1] + self.kinds[kind].value)
            self.relief_after.append(self.relief_after[-1] + self.kinds[kind].relief)
        self.value_after.reverse()
        self.relief_after.reverse()
        self._place(0, 0, 0, [[0] * len(self.kinds) for _ in self.capacities])
        return self.effort.nodes > 0

    def _place(self, index: int, start: int, value: int, counts: list[list[int]]) -> None:
        self.effort.nodes -= 1
        if self.effort.nodes <= 0 or self.best_value >= self.bound or self.capacities[0] + self.relief_after[index] < 0:
            return
        hope = min(self.value_after[index], int(self.density * sum(self.capacities)) + 1)
        if value + hope <= self.best_value:
            return
        if index == len(self.units):
            self.best_value, self.best = value, [list(row) for row in counts]
            return
        kind_index = self.units[index]
        kind = self.kinds[kind_index]
        is_last_of_kind = index + 1 == len(self.units) or self.units[index + 1] != kind_index
        tried: set[int] = set()
        for position in range(start, len(self.capacities)):
            room = self.capacities[position]
            # What is still to come may give the first bin room, so that it may be overdrawn for now.
            fits = kind.weight <= room if position else kind.first_weight <= room + self.relief_after[index + 1]
            if not fits or (position and start == 0 and room in tried):
                continue
            if position:
                tried.add(room)
            self._put(position, kind_index, 1, counts)
            self._place(index + 1, 0 if is_last_of_kind else position, value + kind.value, counts)
            self._put(position, kind_index, -1, counts)
        if self.optional[kind_index] > 0:
            self.optional[kind_index] -= 1
            self._place(index + 1, 0 if is_last_of_kind else len(self.capacities), value, counts)
            self.optional[kind_index] += 1

    def _put(self, position: int, kind_index: int, number: int, counts: list[list[int]]) -> None:
        kind = self.kinds[kind_index]
        counts[position][kind_index] += number
        if position:
            self.capacities[position] -= number * kind.weight
            self.capacities[0] += number * kind.relief
        else:
            self.capacities[0] -= number * kind.first_weight


def pack(kinds: Sequence[Kind], capacities: Sequence[int], *, worth_more_than: int = -1, effort: Effort | None = None) -> Packing | None:
    """The packing that saves the most, with all required units in it; None if there is none, or none worth more than `worth_more_than`.

    The first capacity may be negative, where units with `relief` can make up for it. First bin by bin, each filled as well as what is
    left allows (a knapsack over the kinds). That meets the bound, the sum of what each bin could hold if it were filled alone, in the
    common case of many equal blocks. Where it does not, an exhaustive search follows: exact for small cases, cut off when `effort` is used
    up, and then the result is the best found. The bound tells how far off it can be.
    """
    effort = effort or Effort()
    effort.was_cut_off = False
    bound = _upper_bound(kinds, capacities)
    if bound <= worth_more_than:
        return None
    value, counts = -1, None
    has_relief = any(kind.relief for kind in kinds)
    by_size = sorted(range(len(capacities)), key=capacities.__getitem__)
    others_first = [*range(1, len(capacities)), 0]
    orders = [others_first, [position for position in by_size if position], by_size] if has_relief else [range(len(capacities)), by_size]
    for order in orders:
        filled_value, filled = _fill(kinds, capacities, [*order, 0] if has_relief else order)
        if filled_value > value:
            value, counts = filled_value, filled
        if value >= bound:
            break
    if value < bound:
        search = _Search(kinds, list(capacities), max(value, worth_more_than), bound, effort)
        effort.was_cut_off = not search.run()
        if not effort.was_cut_off:
            bound = search.best_value
        if search.best is not None:
            value, counts = search.best_value, search.best
    if counts is None or value <= worth_more_than:
        return None
    return Packing(tuple(tuple(row) for row in counts), value, bound)


def _weights(kinds: Sequence[Kind], position: int) -> list[int]:
    return [kind.weight if position else kind.first_weight for kind in kinds]


def _upper_bound(kinds: Sequence[Kind], capacities: Sequence[int]) -> int:
    """What all bins could save together if each had all units for itself, and no more than there is; -1 if nothing can be packed."""
    total = sum(kind.value * kind.count for kind in kinds)
    others = capacities[1:]
    relief = min(sum(kind.relief * kind.count for kind in kinds), _alone(kinds, [kind.relief for kind in kinds], 1, others))
    if capacities[0] + relief < 0:
        return -1
    values = [kind.value for kind in kinds]
    rooms = [capacities[0] + relief, *others]
    alone = _alone(kinds, values, 0, rooms[:1]) + _alone(kinds, values, 1, others)
    return min(total, alone, _together(kinds, capacities, rooms))


def _together(kinds: Sequence[Kind], capacities: Sequence[int], rooms: Sequence[int]) -> int:
    """The most that one bin of all the room could hold, of each kind no more than the bins (of `rooms`, at the most) have room for."""
    weights = [min(kind.first_weight, kind.weight - kind.relief) for kind in kinds]
    values = [kind.value for kind in kinds]
    counts = [
        min(
            kind.count,
            sum(room // weight if weight else kind.count for room, weight in zip(rooms, _each(kind, rooms), strict=True) if room >= 0),
        )
        for kind in kinds
    ]
    return _most(weights, values, counts, [max(0, sum(capacities))])


def _each(kind: Kind, rooms: Sequence[int]) -> list[int]:
    return [kind.weight if position else kind.first_weight for position in range(len(rooms))]


def _alone(kinds: Sequence[Kind], values: Sequence[int], position: int, capacities: Sequence[int]) -> int:
    """The most that these bins could hold of `values` if each had all units for itself."""
    return _most(_weights(kinds, position), values, [kind.count for kind in kinds], [each for each in capacities if each >= 0])


def _most(weights: Sequence[int], values: Sequence[int], counts: Sequence[int], capacities: Sequence[int]) -> int:
    if not any(values) or not capacities:
        return 0
    front = _Frontier(weights, values, counts, max(capacities))
    best = max((value / weight for value, weight in zip(values, weights, strict=True) if weight), default=0.0)
    return sum(front.best_value(each) if front.exact else math.ceil(best * each) for each in capacities)


def _fill(kinds: Sequence[Kind], capacities: Sequence[int], order: Iterable[int]) -> tuple[int, list[list[int]] | None]:
    """The bins filled in this order, each as well as possible with what is left; -1 and None if a required unit was left over."""
    required_bonus = 1 + sum((kind.value + kind.relief) * kind.count for kind in kinds)
    # Required units are kinds of their own here, worth more than everything else together.
    parts = [(index, kind.required, required_bonus) for index, kind in enumerate(kinds) if kind.required]
    parts += [(index, kind.count - kind.required, 0) for index, kind in enumerate(kinds) if kind.count > kind.required]
    left = [count for _, count, _ in parts]
    counts = [[0] * len(kinds) for _ in capacities]
    room = list(capacities)
    for position in order:
        if room[position] < 0:
            continue
        weights = _weights(kinds, position)
        # On other bins the room that the first one gains is worth about as many bytes as it is.
        values = [kind.value + (kind.relief if position else 0) for kind in kinds]
        front = _Frontier(
            [weights[index] for index, _, _ in parts], [values[index] + bonus for index, _, bonus in parts], left, room[position]
        )
        for part, taken in enumerate(front.best_counts()):
            index = parts[part][0]
            left[part] -= taken
            counts[position][index] += taken
            room[position] -= taken * weights[index]
            room[0] += taken * kinds[index].relief if position else 0
    if room[0] < 0 or any(left[part] for part, (_, _, bonus) in enumerate(parts) if bonus):
        return -1, None
    return sum(row[index] * kind.value for row in counts for index, kind in enumerate(kinds)), counts
