"""Filling devices with the units that save the most: several knapsacks, many equal units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Kind", "Packing", "pack"]

STATE_LIMIT = 4096
"""Partial fillings kept at a time; beyond it the best of each 1/4096 of the capacity stays."""
NODE_LIMIT = 20_000
"""Steps of the exhaustive search before it settles for the best that it has found."""

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
    best: list[list[int]] | None = None
    nodes: int = 0
    units: list[int] = field(default_factory=list)
    value_after: list[int] = field(default_factory=list)
    optional: list[int] = field(default_factory=list)
    density: float = 0.0

    def run(self) -> bool:
        """Whether the search was complete."""
        by_size = sorted(range(len(self.kinds)), key=lambda kind: -self.kinds[kind].weight)
        self.units = [kind for kind in by_size for _ in range(self.kinds[kind].count)]
        if len(self.units) > 400:  # deeper than Python likes to recurse, and far beyond what can be searched
            return False
        self.optional = [kind.count - kind.required for kind in self.kinds]
        self.density = max((kind.value / max(1, min(kind.first_weight, kind.weight)) for kind in self.kinds), default=0.0)
        self.value_after = [0]
        for kind in reversed(self.units):
            self.value_after.append(self.value_after[-1] + self.kinds[kind].value)
        self.value_after.reverse()
        self._place(0, 0, 0, [[0] * len(self.kinds) for _ in self.capacities])
        return self.nodes <= NODE_LIMIT

    def _place(self, index: int, start: int, value: int, counts: list[list[int]]) -> None:
        self.nodes += 1
        if self.nodes > NODE_LIMIT or self.best_value >= self.bound:
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
        tried: set[tuple[int, int]] = set()
        for position in range(start, len(self.capacities)):
            weight = kind.weight if position else kind.first_weight
            room = self.capacities[position]
            if weight > room or (start == 0 and (room, weight) in tried and position):
                continue
            if position:
                tried.add((room, weight))
            self.capacities[position] -= weight
            counts[position][kind_index] += 1
            self._place(index + 1, 0 if is_last_of_kind else position, value + kind.value, counts)
            counts[position][kind_index] -= 1
            self.capacities[position] += weight
        if self.optional[kind_index] > 0:
            self.optional[kind_index] -= 1
            self._place(index + 1, 0 if is_last_of_kind else len(self.capacities), value, counts)
            self.optional[kind_index] += 1


def pack(kinds: Sequence[Kind], capacities: Sequence[int], *, worth_more_than: int = -1) -> Packing | None:
    """The packing that saves the most, with all required units in it; None if there is none, or none worth more than `worth_more_than`.

    First bin by bin, each filled as well as what is left allows (a knapsack over the kinds). That meets the bound, the sum of what each
    bin could hold if it were filled alone, in the common case of many equal blocks. Where it does not, an exhaustive search follows: exact
    for small cases, cut off after `NODE_LIMIT` steps, and then the result is the best found. The bound tells how far off it can be.
    """
    bound = _upper_bound(kinds, capacities)
    if bound <= worth_more_than:
        return None
    value, counts = -1, None
    for order in (range(len(capacities)), sorted(range(len(capacities)), key=capacities.__getitem__)):
        filled_value, filled = _fill(kinds, capacities, order)
        if filled_value > value:
            value, counts = filled_value, filled
        if value >= bound:
            break
    if value < bound:
        search = _Search(kinds, list(capacities), max(value, worth_more_than), bound)
        if search.run():
            bound = search.best_value
        if search.best is not None:
            value, counts = search.best_value, search.best
    if counts is None or value <= worth_more_than:
        return None
    return Packing(tuple(tuple(row) for row in counts), value, bound)


def _weights(kinds: Sequence[Kind], position: int) -> list[int]:
    return [kind.weight if position else kind.first_weight for kind in kinds]


def _upper_bound(kinds: Sequence[Kind], capacities: Sequence[int]) -> int:
    """What all bins could save together if each had all units for itself, and no more than there is to save."""
    values, counts = [kind.value for kind in kinds], [kind.count for kind in kinds]
    total = sum(kind.value * kind.count for kind in kinds)
    alone = 0
    for position, capacity in ((0, capacities[0]), (1, max(capacities[1:], default=-1))):
        if capacity < 0:
            continue
        front = _Frontier(_weights(kinds, position), values, counts, capacity)
        bins = capacities[1:] if position else capacities[:1]
        best = max((kind.value / weight for kind, weight in zip(kinds, _weights(kinds, position), strict=True) if weight), default=0.0)
        alone += sum(front.best_value(each) if front.exact else math.ceil(best * each) for each in bins)
    return min(total, alone)


def _fill(kinds: Sequence[Kind], capacities: Sequence[int], order: Iterable[int]) -> tuple[int, list[list[int]] | None]:
    """The bins filled in this order, each as well as possible with what is left; -1 and None if a required unit was left over."""
    required_bonus = 1 + sum(kind.value * kind.count for kind in kinds)
    # Required units are kinds of their own here, worth more than everything else together.
    parts = [(index, kind.required, kind.value + required_bonus) for index, kind in enumerate(kinds) if kind.required]
    parts += [(index, kind.count - kind.required, kind.value) for index, kind in enumerate(kinds) if kind.count > kind.required]
    left = [count for _, count, _ in parts]
    counts = [[0] * len(kinds) for _ in capacities]
    for position in order:
        weights = _weights(kinds, position)
        front = _Frontier([weights[index] for index, _, _ in parts], [value for _, _, value in parts], left, capacities[position])
        for part, taken in enumerate(front.best_counts()):
            left[part] -= taken
            counts[position][parts[part][0]] += taken
    if any(left[part] for part, (_, _, value) in enumerate(parts) if value > required_bonus):
        return -1, None
    return sum(row[index] * kind.value for row in counts for index, kind in enumerate(kinds)), counts
