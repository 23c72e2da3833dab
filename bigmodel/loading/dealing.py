"""Which process reads which part of which tensor, when several load the same: the same bytes each, side by side in the files."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..protocols import TensorSpec

__all__ = ["Chunk", "Share", "shares"]

UNIT_BYTES: Final = 128 << 10
"""Tensors are cut between rows of their last dimensions of at most this much."""
ALIGNMENT: Final = 16
"""Of each chunk among the bytes that are sent, so that it can be seen as any dtype."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor whose elements are neighbours in it."""

    name: str
    start: tuple[int, ...]
    spec: TensorSpec
    place: int
    """First byte among those that are sent together."""

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize

    def of(self, sent: torch.Tensor) -> torch.Tensor:
        """Its values in the bytes that are sent together."""
        return sent[self.place : self.place + self.nbytes].view(self.spec.dtype).view(self.spec.shape)


@dataclass(frozen=True, slots=True)
class Share:
    """What one process reads at once, and sends to the others."""

    chunks: tuple[Chunk, ...]
    nbytes: int
    """To be sent."""


def shares(specs: Mapping[str, TensorSpec], readers: int, share_bytes: int) -> Iterator[Sequence[Share]]:
    """Round by round what each of the readers reads, of tensors in the order in which they lie in files. All can work it out alone.

    Each reader has its own stretch of the files, all of the same length in bytes of the model, give or take a unit. So is a share, which
    has at most `share_bytes`.
    """
    tensors = [(name, spec, _dims_cut(spec)) for name, spec in specs.items() if 0 not in spec.shape]
    ends = list(itertools.accumulate(math.prod(spec.shape) * spec.dtype.itemsize for _, spec, _ in tensors))
    total = ends[-1] if ends else 0
    rounds = -(-total // (readers * share_bytes))
    cuts = [total * number // (readers * rounds) for number in range(readers * rounds + 1)] if rounds else []
    for number in range(rounds):
        yield [_share(tensors, ends, cuts[first], cuts[first + 1]) for first in range(number, readers * rounds, rounds)]


def _share(tensors: Sequence[tuple[str, TensorSpec, int]], ends: Sequence[int], low: int, high: int) -> Share:
    """The units that begin within bytes `low … high` of all tensors in a row, counted to the nearest unit."""
    chunks: list[Chunk] = []
    nbytes = 0
    for number in range(bisect.bisect_right(ends, low - UNIT_BYTES), len(tensors)):
        name, spec, dims = tensors[number]
        begin = ends[number - 1] if number else 0
        if begin - UNIT_BYTES > high:
            break
        unit_bytes = math.prod(spec.shape[dims:]) * spec.dtype.itemsize
        units = math.prod(spec.shape[:dims])
        first, stop = (min(max(0, (cut - begin + unit_bytes // 2) // unit_bytes), units) for cut in (low, high))
        for start, shape in _boxes(spec.shape, dims, first, stop):
            chunks.append(Chunk(name, start, TensorSpec(shape, spec.dtype), nbytes))
            nbytes += -(-chunks[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return Share(tuple(chunks), nbytes)


def _dims_cut(spec: TensorSpec) -> int:
    """How many of the first dimensions are cut: as few as give units of at most `UNIT_BYTES`."""
    return next(
        dims
        for dims in range(min(1, len(spec.shape)), len(spec.shape) + 1)
        if math.prod(spec.shape[dims:]) * spec.dtype.itemsize <= UNIT_BYTES
    )


def _boxes(shape: tuple[int, ...], dims: int, first: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Units `first … stop` of those that the first `dims` dimensions count, as starts and shapes of boxes."""
    if first >= stop:
        return
    if dims == 0:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:dims])
    while first < stop:
        row = first // inner
        if first % inner == 0 and stop - first >= inner:
            count = (stop - first) // inner
            yield (row, *(0,) * (len(shape) - 1)), (count, *shape[1:])
            first += count * inner
        else:
            end = min(stop, (row + 1) * inner)
            for start, box in _boxes(shape[1:], dims - 1, first - row * inner, end - row * inner):
                yield (row, *start), (1, *box)
            first = end
