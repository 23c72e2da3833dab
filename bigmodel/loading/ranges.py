"""From pieces to byte ranges: what is read where, in chunks of bounded size, merged where ranges are neighbours in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .entry import Entry, contiguous_strides
from .location import CheckpointFile, RemoteFile
from .transfer import Computation, Piece, Transfer

__all__ = ["Batch", "Range", "ReadPlan", "plan_reads"]

DIRECT_BYTES: Final = 8 << 20
"""Longest read straight into place: long enough for any disk, short enough that several threads share one big tensor."""
STAGED_BYTES: Final = 1 << 20
"""Longest read that is cast or turned on the way: it stays in a core's cache between the read and the copy."""
QUEUED_BYTES: Final = 2 << 20
"""Longest read whose bytes are copied to an accelerator: each copy costs the host a while, whatever its length."""
SHORTEST_RUN_BYTES: Final = 64 << 10
"""Runs of a strided piece below this are cheaper read in one go and copied than read one by one."""
GAP_BYTES: Final = 128 << 10
"""Bytes between two ranges that are read and thrown away rather than asked for apart."""
APART_BYTES: Final = 32 << 10
"""Shortest run of a strided piece that is read apart through the page cache, into place in host memory, where at least half of what is
read were thrown away otherwise. Below, asking takes longer than reading it. Casts, and reads past the page cache, want it twice as long."""
MAX_BUFFERS: Final = 512
"""Buffers of one scattered read; systems allow 1024 (IOV_MAX)."""
ALIGNMENT: Final = 64
"""Of each staged range in staging memory, so that it can be seen as any dtype (bytes)."""

_Dims = list[tuple[int, int, int]]
"""Size, elements between neighbours in the file, elements between neighbours in the destination."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file that are neighbours there, and the elements of a destination that they become."""

    file: CheckpointFile
    offset: int
    nbytes: int
    job: int
    """Which destination."""
    first: int
    """Element of the destination that the range's first element becomes."""
    dims: tuple[tuple[int, int, int], ...] | None
    """None: the bytes are the elements, in order; read them into place. Otherwise as in `_Dims`: stage them and copy."""
    dtype: torch.dtype
    rounded: torch.dtype
    """A dtype that the values pass through when it is neither the file's nor the destination's."""

    @property
    def staged_bytes(self) -> int:
        """Staging memory that it takes."""
        return 0 if self.dims is None else -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def filled_bytes(self) -> int:
        """Bytes that become elements: fewer than those read where a strided view leaves some out."""
        return self.nbytes if self.dims is None else math.prod(size for size, _, _ in self.dims) * self.dtype.itemsize

    @property
    def filled_elements(self) -> int:
        """Neighbours in the destination, from `first` on, that it fills; 0 where it leaves some out between them."""
        if self.dims is None:
            return self.nbytes // self.dtype.itemsize
        count = math.prod(size for size, _, _ in self.dims)
        return count if count == 1 + sum((size - 1) * target for size, _, target in self.dims) else 0


@dataclass(slots=True)
class Batch:
    """Ranges that one scattered read brings, in file order, without overlaps."""

    file: CheckpointFile
    ranges: list[Range]
    staged_bytes: int = 0
    nbytes: int = 0
    """From the first byte to the last, gaps included."""
    filled_bytes: int = 0
    """Bytes that become elements."""
    read_again: bool = False
    """Whether other batches read some of these bytes too."""

    @property
    def has_gaps(self) -> bool:
        """Whether bytes between the ranges are read and thrown away."""
        return self.nbytes > sum(each.nbytes for each in self.ranges)

    @property
    def can_be_copied_whole(self) -> bool:
        """Whether all of it is copied on from where it is read to, and can be seen there as what it is."""
        return not self.read_again and all(each.dims is not None and each.offset % each.dtype.itemsize == 0 for each in self.ranges)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How some tensors are read: made once, carried out with any destinations of the same shapes, dtypes and kind of device."""

    transfers: tuple[Transfer, ...]
    batches: tuple[Batch, ...]
    """Of files on this machine."""
    remote: tuple[Batch, ...]
    """Of remote files."""
    files: frozenset[CheckpointFile]
    """Those on this machine."""
    filled_bytes: int
    """Bytes of the batches that become elements."""
    computed: tuple[tuple[int, Piece, Computation], ...]
    """Pieces that a function makes, and the number of their transfer."""


def plan_reads(jobs: Sequence[tuple[Transfer, torch.dtype, bool]], *, past_cache: bool = False) -> ReadPlan:
    """The plan for transfers into destinations of a dtype, in host memory or not, for reads that may go past the page cache or not."""
    apart_bytes = 2 * APART_BYTES if past_cache else APART_BYTES
    ranges = [
        each for number, (transfer, dtype, on_host) in enumerate(jobs) for each in _ranges(number, transfer, dtype, on_host, apart_bytes)
    ]
    found = tuple(_batches(ranges, apart_bytes))
    local = tuple(batch for batch in found if not isinstance(batch.file, RemoteFile))
    computed = (
        (number, piece, piece.origin)
        for number, (transfer, _, _) in enumerate(jobs)
        for piece in transfer.pieces
        if isinstance(piece.origin, Computation)
    )
    return ReadPlan(
        transfers=tuple(transfer for transfer, _, _ in jobs),
        batches=local,
        remote=tuple(batch for batch in found if isinstance(batch.file, RemoteFile)),
        files=frozenset(batch.file for batch in local),
        filled_bytes=sum(batch.filled_bytes for batch in found),
        computed=tuple(computed),
    )


def _merged(piece: Piece, target_strides: tuple[int, ...]) -> _Dims:
    """The dimensions of a piece in file order, neighbours merged where both sides allow it."""
    dims = sorted(
        (
            (size, source, target)
            for size, source, target in zip(piece.shape, piece.source_strides, target_strides, strict=True)
            if size != 1
        ),
        key=lambda dim: -dim[1],
    )
    merged: _Dims = []
    for size, source, target in dims:
        if merged and merged[-1][1] == size * source and merged[-1][2] == size * target:
            merged[-1] = (merged[-1][0] * size, source, target)
        else:
            merged.append((size, source, target))
    return merged


def _span(dims: _Dims) -> int:
    return 1 + sum((size - 1) * source for size, source, _ in dims)


def _chunks(dims: _Dims, limit: int, source: int, target: int) -> Iterator[tuple[int, int, _Dims]]:
    """Parts of a piece whose span in the file is at most `limit` elements: first element there, in the destination, dimensions."""
    if not dims or _span(dims) <= limit:
        yield source, target, dims
        return
    (size, source_step, target_step), inner = dims[0], dims[1:]
    count = max(1, (limit - _span(inner)) // source_step + 1)
    for start in range(0, size, count):
        number = min(count, size - start)
        rest = inner if number == 1 else [(number, source_step, target_step), *inner]
        yield from _chunks(rest, limit, source + start * source_step, target + start * target_step)


def _starts(dims: _Dims, source: int, target: int) -> Iterator[tuple[int, int]]:
    """The first elements, in the file and in the destination, of every run that lies within these outer dimensions."""
    if not dims:
        yield source, target
        return
    (size, source_step, target_step), inner = dims[0], dims[1:]
    for index in range(size):
        yield from _starts(inner, source + index * source_step, target + index * target_step)


def _ranges(job: int, transfer: Transfer, dtype: torch.dtype, on_host: bool, apart_bytes: int) -> Iterator[Range]:
    strides = contiguous_strides(transfer.shape)
    for piece in transfer.pieces:
        if isinstance(piece.origin, Entry) and 0 not in piece.shape:
            as_is = on_host and piece.origin.dtype == transfer.dtype == dtype
            apart = (apart_bytes if as_is else 2 * apart_bytes) if on_host else None
            yield from _ranges_of_piece(job, piece, piece.origin, strides, transfer.dtype, as_is, apart)


def _ranges_of_piece(
    job: int, piece: Piece, entry: Entry, strides: tuple[int, ...], rounded: torch.dtype, as_is: bool, apart_bytes: int | None
) -> Iterator[Range]:
    """`apart_bytes` is the shortest run that is read apart; None for an accelerator, where each copy has its price."""
    item = entry.dtype.itemsize
    first = sum(start * stride for start, stride in zip(piece.start, strides, strict=True))
    dims = _merged(piece, strides)
    in_order = not dims or dims[-1][1:] == (1, 1)
    run = dims[-1][0] if dims and in_order else 1
    skips_half = in_order and len(dims) > 1 and dims[-2][1] >= 2 * run and not isinstance(entry.file, RemoteFile)
    is_apart = skips_half and apart_bytes is not None and run * item >= apart_bytes
    if is_apart or (as_is and in_order and (len(dims) <= 1 or run * item >= SHORTEST_RUN_BYTES)):
        longest = (DIRECT_BYTES if as_is else STAGED_BYTES) // item
        for source, target in _starts(dims[:-1], piece.source_offset, first):
            for start in range(0, run, longest):
                number = min(longest, run - start)
                offset = entry.offset + (source + start) * item
                copied = None if as_is else ((number, 1, 1),)
                yield Range(entry.file, offset, number * item, job, target + start, copied, entry.dtype, rounded)
        return
    staged_bytes = QUEUED_BYTES if apart_bytes is None else STAGED_BYTES
    for source, target, part in _chunks(dims, staged_bytes // item, piece.source_offset, first):
        yield Range(entry.file, entry.offset + source * item, _span(part) * item, job, target, tuple(part), entry.dtype, rounded)


def _batches(ranges: Iterable[Range], apart_bytes: int) -> Iterator[Batch]:
    """Ranges in file order, neighbours together as far as staging memory, size and number of buffers allow."""
    batch: Batch | None = None
    end = reach = 0
    for each in sorted(ranges, key=lambda one: (str(one.file), one.offset)):
        gap = each.offset - end
        if (
            batch is None
            or batch.file != each.file
            or not 0 <= gap <= GAP_BYTES
            or (gap >= each.nbytes >= apart_bytes and batch.ranges[-1].job == each.job and not isinstance(each.file, RemoteFile))
            or len(batch.ranges) >= MAX_BUFFERS
            or batch.nbytes + gap + each.nbytes > DIRECT_BYTES
            or batch.staged_bytes + each.staged_bytes > STAGED_BYTES
        ):
            if batch is None or batch.file != each.file:
                reach = 0
            overlaps = each.offset < reach
            if batch is not None:
                batch.read_again |= overlaps
                yield batch
            batch, gap = Batch(each.file, [], read_again=overlaps), 0
        batch.ranges.append(each)
        batch.staged_bytes += each.staged_bytes
        batch.nbytes += gap + each.nbytes
        batch.filled_bytes += each.filled_bytes
        end = each.offset + each.nbytes
        reach = max(reach, end)
    if batch is not None:
        yield batch
