"""All ranges of files that fill one tensor, as strided views: what the reader needs to read them straight into place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from ..errors import MatchError
from .entry import Dequantized, Entry, Packed, Scaled, Sharded, Turned, contiguous_strides
from .finite import refuse_not_finite
from .keys import Computed, Concatenate, Slice, Source, Stack, Transpose, Unmade, Whole

__all__ = ["Computation", "Piece", "Transfer", "lower"]

UNPACKED_BYTES: Final = 4 << 20
"""Of unpacked rows that are made at once."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A tensor that a function makes of whole tensors."""

    inputs: tuple[Transfer, ...]
    function: Callable[[list[torch.Tensor]], torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None where the result already has the target's dtype."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided view of an entry (or of a computed tensor), and the box of the tensor that it fills."""

    origin: Entry | Computation
    start: tuple[int, ...]
    """First index of the box in each dimension of the tensor."""
    shape: tuple[int, ...]
    """Of the box, and of the view."""
    source_offset: int
    """Elements from the origin's first element to the view's."""
    source_strides: tuple[int, ...]
    """Elements of the origin between neighbours, in the order of the box's dimensions."""

    def clipped(self, dim: int, start: int, length: int, place: int = 0) -> Piece | None:
        """The part of this piece in `start … start + length` of a dimension, which `place` becomes; None where there is none."""
        low = max(self.start[dim], start)
        high = min(self.start[dim] + self.shape[dim], start + length)
        if low >= high:
            return None
        return Piece(
            self.origin,
            _with(self.start, dim, low - start + place),
            _with(self.shape, dim, high - low),
            self.source_offset + (low - self.start[dim]) * self.source_strides[dim],
            self.source_strides,
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """What fills one tensor of the model."""

    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What the tensor shall have; pieces are cast to it on the way."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the filled tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def bytes_to_read(self) -> int:
        """Bytes of the files that become elements."""
        total = 0
        for piece in self.pieces:
            if isinstance(piece.origin, Entry):
                total += math.prod(piece.shape) * piece.origin.dtype.itemsize
            else:
                total += sum(part.bytes_to_read for part in piece.origin.inputs)
        return total

    def entries(self) -> Iterator[Entry]:
        """All entries that are read, once for each piece."""
        for piece in self.pieces:
            if isinstance(piece.origin, Entry):
                yield piece.origin
            else:
                for transfer in piece.origin.inputs:
                    yield from transfer.entries()

    def box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Transfer:
        """The transfer of `start … start + shape` of every dimension alone."""
        pieces = list(self.pieces)
        for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
            pieces = [part for piece in pieces if (part := piece.clipped(dim, first, length)) is not None]
        return Transfer(self.target, shape, self.dtype, tuple(pieces))

    def transposed(self) -> Transfer:
        """The transfer of the transposed matrix."""
        pieces = [
            replace(piece, start=piece.start[::-1], shape=piece.shape[::-1], source_strides=piece.source_strides[::-1])
            for piece in self.pieces
        ]
        return replace(self, shape=self.shape[::-1], pieces=tuple(pieces))

    def rows(self, start: int, length: int) -> Transfer:
        """The transfer of rows `start … start + length` of the first dimension alone."""
        return self.gathered([(start, length)])

    def gathered(self, runs: Sequence[tuple[int, int]]) -> Transfer:
        """The transfer of runs of rows (first row, how many), one after the other."""
        pieces = []
        place = 0
        for start, length in runs:
            for piece in self.pieces:
                part = piece.clipped(0, start, length, place)
                if part is not None:
                    pieces.append(part)
            place += length
        return Transfer(self.target, (place, *self.shape[1:]), self.dtype, tuple(pieces))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def lower(source: Source, entries: Mapping[str, Entry], target: str, dtype: torch.dtype) -> Transfer:
    """The transfer that `source` stands for. Raises `MatchError`, naming `target`, when its parts do not fit each other."""
    shape, pieces = _lowered(source, entries, target)
    return Transfer(target, shape, dtype, tuple(pieces))


def _dim(dim: int, dimensions: int, target: str) -> int:
    if not -dimensions <= dim < dimensions:
        raise MatchError(f"{target!r}: its key rule asks for dimension {dim} of a tensor of {dimensions} dimensions.")
    return dim % dimensions


def _lowered(source: Source, entries: Mapping[str, Entry], target: str) -> tuple[tuple[int, ...], list[Piece]]:
    if isinstance(source, Whole):
        if source.name not in entries:
            raise MatchError(f"{target!r}: its key rule asks for {source.name!r}, which the checkpoint does not hold.")
        entry = entries[source.name]
        return entry.shape, list(_pieces(entry))
    if isinstance(source, Unmade):
        raise MatchError(source.reason)
    if isinstance(source, Computed):
        inputs = tuple(_input(part, entries, target) for part in source.sources)
        shape = source.shape
        computation = Computation(inputs, source.function, shape, source.dtype)
        return shape, [Piece(computation, (0,) * len(shape), shape, 0, contiguous_strides(shape))]
    if isinstance(source, Transpose):
        shape, pieces = _lowered(source.source, entries, target)
        dim0, dim1 = _dim(source.dim0, len(shape), target), _dim(source.dim1, len(shape), target)
        order = list(range(len(shape)))
        order[dim0], order[dim1] = dim1, dim0
        return _permuted(shape, order), [
            Piece(
                piece.origin,
                _permuted(piece.start, order),
                _permuted(piece.shape, order),
                piece.source_offset,
                _permuted(piece.source_strides, order),
            )
            for piece in pieces
        ]
    if isinstance(source, Slice):
        shape, pieces = _lowered(source.source, entries, target)
        dim = _dim(source.dim, len(shape), target)
        if source.start < 0 or source.length < 0 or source.start + source.length > shape[dim]:
            raise MatchError(
                f"{target!r}: its key rule asks for {source.start} … {source.start + source.length} "
                f"of dimension {dim} of shape {list(shape)}."
            )
        parts = [piece.clipped(dim, source.start, source.length) for piece in pieces]
        return _with(shape, dim, source.length), [part for part in parts if part is not None]
    if isinstance(source, Stack):
        return _stacked(source, entries, target)
    if isinstance(source, Concatenate):
        return _concatenated(source, entries, target)
    raise TypeError(f"{target!r}: {type(source).__name__} is no source that the loader knows.")


def _pieces(entry: Entry) -> Iterator[Piece]:
    """What fills the whole of an entry's tensor."""
    if isinstance(entry.contents, Sharded):
        for start, part in entry.contents.parts:
            yield Piece(part, start, part.shape, 0, part.element_strides)
    elif isinstance(entry.contents, Packed):
        yield from _unpacked(entry, entry.contents)
    elif isinstance(entry.contents, Scaled):
        yield from _scaled(entry, entry.contents)
    elif isinstance(entry.contents, Dequantized):
        for box in entry.contents.boxes(UNPACKED_BYTES):
            start, shape = box
            inputs = tuple(_clipped(part, *within) for part, within in entry.contents.inputs(box))
            made = Computation(inputs, partial(entry.contents.values, box), shape, entry.dtype)
            yield Piece(made, start, shape, 0, contiguous_strides(shape))
    elif isinstance(entry.contents, Turned):
        order = [*range(len(entry.shape) - 2), len(entry.shape) - 1, len(entry.shape) - 2]
        for piece in _pieces(entry.contents.entry):
            start, shape, strides = (_permuted(each, order) for each in (piece.start, piece.shape, piece.source_strides))
            yield replace(piece, start=start, shape=shape, source_strides=strides)
    else:
        yield Piece(entry, (0,) * len(entry.shape), entry.shape, 0, entry.element_strides)


def _unpacked(entry: Entry, packed: Packed) -> Iterator[Piece]:
    """Rows that are unpacked together: few enough for bounded memory, and no more than a reader of a few rows has to pay for."""
    *outer, rows, length = (1, *entry.shape) if len(entry.shape) == 1 else entry.shape
    together = max(1, UNPACKED_BYTES // max(1, length * entry.dtype.itemsize))
    for number, index in enumerate(itertools.product(*map(range, outer))):
        for first in range(0, rows, together):
            count = min(together, rows - first)
            offset = entry.offset + (number * rows + first) * packed.row_bytes
            nbytes = count * packed.row_bytes
            raw = Entry(entry.name, entry.file, offset, nbytes, torch.uint8, (count, packed.row_bytes))
            transfer = Transfer(entry.name, raw.shape, raw.dtype, (Piece(raw, (0, 0), raw.shape, 0, raw.element_strides),))
            made = Computation((transfer,), partial(_unpack, packed), (count, length), entry.dtype)
            box = (length,) if len(entry.shape) == 1 else (*(1 for _ in outer), count, length)
            start = (0,) if len(entry.shape) == 1 else (*index, first, 0)
            yield Piece(made, start, box, 0, contiguous_strides(box))


def _scaled(entry: Entry, scaled: Scaled) -> Iterator[Piece]:
    """Rows that are multiplied together: whole blocks, few enough for bounded memory."""
    shape, blocks = entry.shape, scaled.blocks
    row_dim = max(0, len(shape) - 2)
    row_bytes = math.prod(shape[row_dim + 1 :]) * entry.dtype.itemsize
    together = max(1, UNPACKED_BYTES // max(1, row_bytes))
    if row_dim < len(shape):
        block = blocks[row_dim]
        # Parts of a block have the same scale, so one that does not fit is cut; but no part reaches into the next one.
        if block < shape[row_dim]:
            together = together // block * block or next(size for size in range(together, 0, -1) if block % size == 0)
    for index in itertools.product(*map(range, shape[:row_dim])):
        for first in range(0, shape[row_dim] if shape else 1, together):
            count = min(together, shape[row_dim] - first) if shape else 1
            start = (*index, first, *(0 for _ in shape[row_dim + 1 :]))[: len(shape)]
            box = (*(1 for _ in index), count, *shape[row_dim + 1 :])[: len(shape)]
            values = _clipped(scaled.values, start, box)
            made = Computation((values, _scales_of(scaled, start, box)), partial(_multiply, scaled), box, entry.dtype)
            yield Piece(made, start, box, 0, contiguous_strides(box))


def _clipped(entry: Entry, start: tuple[int, ...], box: tuple[int, ...]) -> Transfer:
    """The part of an entry's tensor in a box."""
    pieces = list(_pieces(entry))
    for dim, (first, length) in enumerate(zip(start, box, strict=True)):
        pieces = [part for piece in pieces if (part := piece.clipped(dim, first, length)) is not None]
    return Transfer(entry.name, box, entry.dtype, tuple(pieces))


def _scales_of(scaled: Scaled, start: tuple[int, ...], box: tuple[int, ...]) -> Transfer:
    """The scales of a box that begins at the first element of a block, or lies within one, in every dimension; as many dimensions as it."""
    counts = tuple(-(-size // block) if block else 0 for size, block in zip(scaled.values.shape, scaled.blocks, strict=True))
    first = tuple(low // max(1, block) for low, block in zip(start, scaled.blocks, strict=True))
    ends = ((low + size - 1) // max(1, block) + 1 for low, size, block in zip(start, box, scaled.blocks, strict=True))
    seen = replace(scaled.scales, shape=counts, strides=None)
    return _clipped(seen, first, tuple(end - low for low, end in zip(first, ends, strict=True)))


def _multiply(scaled: Scaled, inputs: list[torch.Tensor]) -> torch.Tensor:
    values, scales = inputs
    scales = scales.to(torch.float32)
    refuse_not_finite(scales, scaled.scales.name, scaled.scales.file)
    for dim, (size, block) in enumerate(zip(values.shape, scaled.blocks, strict=True)):
        if scales.shape[dim] > 1 and block > 1:
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return values.to(torch.float32).mul_(scales)


def _unpack(packed: Packed, inputs: list[torch.Tensor]) -> torch.Tensor:
    return packed.unpack(inputs[0])


def _permuted(values: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    return tuple(values[dim] for dim in order)


def _input(source: Source, entries: Mapping[str, Entry], target: str) -> Transfer:
    shape, pieces = _lowered(source, entries, target)
    dtypes = {piece.origin.dtype for piece in pieces if piece.origin.dtype is not None}
    if len(dtypes) != 1:
        raise MatchError(f"{target!r}: parts of one input of its key rule have the dtypes {sorted(map(str, dtypes)) or 'unknown'}.")
    return Transfer(target, shape, dtypes.pop(), tuple(pieces))


def _stacked(source: Stack, entries: Mapping[str, Entry], target: str) -> tuple[tuple[int, ...], list[Piece]]:
    parts = [_lowered(part, entries, target) for part in source.sources]
    shapes = {shape for shape, _ in parts}
    if len(shapes) != 1:
        raise MatchError(f"{target!r}: the tensors to be stacked have different shapes: {sorted(map(list, shapes))}.")
    shape = shapes.pop()
    dim = _dim(source.dim, len(shape) + 1, target)
    pieces = [
        Piece(
            piece.origin,
            (*piece.start[:dim], position, *piece.start[dim:]),
            (*piece.shape[:dim], 1, *piece.shape[dim:]),
            piece.source_offset,
            (*piece.source_strides[:dim], 0, *piece.source_strides[dim:]),
        )
        for position, (_, own) in enumerate(parts)
        for piece in own
    ]
    return (*shape[:dim], len(parts), *shape[dim:]), pieces


def _concatenated(source: Concatenate, entries: Mapping[str, Entry], target: str) -> tuple[tuple[int, ...], list[Piece]]:
    parts = [_lowered(part, entries, target) for part in source.sources]
    if not parts:
        raise MatchError(f"{target!r}: its key rule concatenates nothing.")
    first = parts[0][0]
    dim = _dim(source.dim, len(first), target)
    if any(_with(shape, dim, 0) != _with(first, dim, 0) if len(shape) == len(first) else True for shape, _ in parts):
        raise MatchError(
            f"{target!r}: tensors of shapes {[list(shape) for shape, _ in parts]} cannot be concatenated along dimension {dim}."
        )
    positions = itertools.accumulate((shape[dim] for shape, _ in parts), initial=0)
    pieces = [
        replace(piece, start=_with(piece.start, dim, piece.start[dim] + position))
        for position, (_, own) in zip(positions, parts, strict=False)
        for piece in own
    ]
    return _with(first, dim, sum(shape[dim] for shape, _ in parts)), pieces
