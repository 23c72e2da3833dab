"""How bytes of checkpoints become tensors: in file order, by several threads, through bounded memory, straight into place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from ..devices import reading_threads
from ..errors import MatchError
from ..progress import Progress
from ..waiting import result_of, submitted
from .copying import copy_rounded
from .entry import FileIdentity, contiguous_strides
from .files import OpenFiles
from .fresh_memory import ask_for_huge_pages, take_pages
from .host_memory import empty_host_tensor
from .location import CheckpointFile
from .ranges import Batch, Range, ReadPlan, plan_reads
from .remote.reader import RemoteReader
from .staging import Staging, side_streams
from .transfer import Computation, Piece, Transfer
from .ways import Reading, Way
from .workers import Crew, direct_reading_threads, spare_workers, workers

__all__ = ["Reader"]

INLINE_BYTES: Final = 512 << 10
"""Reads up to this are done by the caller's own thread: handing them over costs more."""
AHEAD_BYTES: Final = 32 << 20
"""How far ahead of the reading threads the system is told what they will ask for."""

SPARE_PATIENCE: Final = 2
"""Batches in a row that a thread beyond the number of cores finds in the page cache before it leaves: only disks are waited for."""


class Reader:
    """Reads transfers into tensors. Safe to be used by several threads at once.

    `identities` are the files as they were when the checkpoint was opened; a file without one is taken as it is at its first read.
    `reading` is for reads of more than `INLINE_BYTES`; what is read again and again belongs in the page cache.
    """

    def __init__(self, identities: Mapping[CheckpointFile, FileIdentity] | None = None, reading: Reading = "buffered") -> None:
        self.files = OpenFiles(identities)
        self._reading = reading
        self._remote = RemoteReader(identities)

    def read(
        self,
        jobs: Sequence[tuple[Transfer, torch.Tensor]],
        progress: Progress | None = None,
        *,
        in_this_thread: bool = False,
        fresh: bool = False,
    ) -> int:
        """Fills each tensor (contiguous, of the transfer's shape, on any device, any float dtype where the transfer's is one).

        Values are those of the transfer's dtype, then cast to the tensor's. Staging memory beside the tensors is at most
        `constants.RING_BYTES`. Returns the bytes of the files that became elements. Raises `CheckpointError` when a file has changed, also
        meanwhile, or ends early; what the tensors hold then is undefined. Who is one of several threads already reads `in_this_thread`.
        `fresh` tensors have never been written to, so that their memory has yet to be given to the process.
        """
        kinds = [(transfer, tensor.dtype, tensor.device.type == "cpu") for transfer, tensor in jobs]
        plan = plan_reads(kinds, past_cache=self._reading != "buffered")
        destinations = [tensor for _, tensor in jobs]
        return self.carry_out(plan, destinations, progress, in_this_thread=in_this_thread, fresh=fresh)

    def carry_out(
        self,
        plan: ReadPlan,
        destinations: Sequence[torch.Tensor],
        progress: Progress | None = None,
        *,
        in_this_thread: bool = False,
        fresh: bool = False,
    ) -> int:
        """Reads by a plan that `plan_reads` made for such destinations: for who reads the same tensors again and again. See `read`."""
        for transfer, destination in zip(plan.transfers, destinations, strict=True):
            if destination.shape != transfer.shape or not destination.is_contiguous():
                raise ValueError(f"{transfer.target!r}: the destination must be contiguous and of shape {list(transfer.shape)}.")
        self._read_batches(plan, destinations, progress, in_this_thread=in_this_thread, fresh=fresh)
        self.files.checked(plan.files)  # whoever wrote to one meanwhile has mixed its values
        total = plan.filled_bytes
        for number, piece, computation in plan.computed:
            total += self._compute(piece, computation, plan.transfers[number], destinations[number], progress, in_this_thread)
        return total

    def _read_batches(
        self, plan: ReadPlan, destinations: Sequence[torch.Tensor], progress: Progress | None, *, in_this_thread: bool, fresh: bool
    ) -> None:
        descriptors = self.files.checked(plan.files)
        flat = [destination.detach().view(-1) for destination in destinations]
        streams = side_streams(flat)
        if plan.remote:
            self._remote.read(plan.remote, flat, progress)
        if in_this_thread or len(plan.batches) <= 1 or plan.filled_bytes <= INLINE_BYTES:
            _drain(iter(plan.batches), flat, streams, Way("buffered", self.files, descriptors, 0), progress, Crew())
            return
        way = Way(self._reading, self.files, descriptors, sum(batch.nbytes for batch in plan.batches))
        pending = _Shared(plan.batches, descriptors, way)
        if fresh:
            ask_for_huge_pages(flat)
        crew = Crew()
        count = min(reading_threads() if way.is_buffered else direct_reading_threads(), len(plan.batches))
        try:
            futures = []
            for number in range(count):
                is_spare = number >= reading_threads()
                pool = spare_workers if is_spare else workers
                futures.append(submitted(pool, _drain, pending, flat, streams, way, progress, crew, fresh=fresh, is_spare=is_spare))
            for future in futures:
                result_of(future)
        finally:
            # An error or Ctrl-C: nobody may write into the destinations once this has returned.
            crew.stop()

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self.files.close()

    def _compute(
        self,
        piece: Piece,
        computation: Computation,
        transfer: Transfer,
        destination: torch.Tensor,
        progress: Progress | None,
        in_this_thread: bool,
    ) -> int:
        inputs = [empty_host_tensor(part.shape, part.dtype) for part in computation.inputs]
        total = self.read(list(zip(computation.inputs, inputs, strict=True)), progress, in_this_thread=in_this_thread)
        result = computation.function(inputs)
        del inputs
        if tuple(result.shape) != computation.shape:
            raise MatchError(
                f"{transfer.target!r}: its key rule promised a tensor of shape {list(computation.shape)}, "
                f"and made one of {list(result.shape)}."
            )
        result = result.detach().contiguous()
        view = result.as_strided(piece.shape, piece.source_strides, result.storage_offset() + piece.source_offset)
        strides = contiguous_strides(transfer.shape)
        first = sum(start * stride for start, stride in zip(piece.start, strides, strict=True))
        flat = destination.detach().view(-1)
        with torch.inference_mode():
            copy_rounded(flat.as_strided(piece.shape, strides, flat.storage_offset() + first), view, transfer.dtype)
        return total


class _Shared:
    """Batches that several threads take from. The system is told in time of what will be read next through the page cache.

    A thread that casts does not read meanwhile, and a disk does not read what nobody has asked for.
    """

    def __init__(self, batches: Sequence[Batch], descriptors: Mapping[CheckpointFile, int], way: Way) -> None:
        self._batches = batches
        self._descriptors = descriptors
        self._way = way
        self._lock = threading.Lock()
        self._next = 0
        self._announced = 0
        self._ahead_bytes = 0

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Batch:
        coming: list[Batch] = []
        with self._lock:
            if self._next == len(self._batches):
                raise StopIteration
            batch = self._batches[self._next]
            self._next += 1
            self._ahead_bytes -= batch.nbytes
            while self._ahead_bytes < AHEAD_BYTES and self._announced < len(self._batches):
                coming.append(self._batches[self._announced])
                self._ahead_bytes += coming[-1].nbytes
                self._announced += 1
        for each in coming:
            if each.staged_bytes and self._way.is_buffered and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptors[each.file], each.ranges[0].offset, each.nbytes, os.POSIX_FADV_WILLNEED)
        return batch


def _drain(
    work: Iterator[Batch],
    destinations: Sequence[torch.Tensor],
    streams: Mapping[torch.device, torch.Stream],
    way: Way,
    progress: Progress | None,
    crew: Crew,
    *,
    fresh: bool = False,
    is_spare: bool = False,
) -> None:
    window = None
    cached = 0
    # Destinations may be tensors made in inference mode, which no other mode may write to.
    with crew.at_work(), torch.inference_mode():
        staging = Staging(destinations, streams)
        try:
            for batch in work:
                if crew.stopped:
                    return
                if window is None and not way.is_buffered:
                    window = way.new_window()
                if fresh:
                    _take_pages(batch, destinations)
                past_cache = _read_batch(batch, destinations, way, staging, window)
                if progress is not None:
                    progress.advance(batch.filled_bytes)
                cached = 0 if past_cache else cached + 1
                if is_spare and cached == SPARE_PATIENCE:
                    return
        finally:
            staging.finish()


def _take_pages(batch: Batch, destinations: Sequence[torch.Tensor]) -> None:
    for each in batch.ranges:
        destination = destinations[each.job]
        if destination.device.type == "cpu":
            take_pages(destination, each.first, each.filled_elements)


def _read_batch(
    batch: Batch,
    destinations: Sequence[torch.Tensor],
    way: Way,
    staging: Staging,
    window: torch.Tensor | None,
) -> bool:
    """Returns whether the bytes came past the page cache."""
    if window is not None and staging.is_immediate and batch.can_be_copied_whole:
        start = batch.ranges[0].offset
        found = way.read_window(batch.file, start, batch.nbytes, window)
        if found is not None:
            staging.put([(each, found[each.offset - start : each.offset - start + each.nbytes]) for each in batch.ranges])
            return True
    parts: list[torch.Tensor] = []
    copies: list[tuple[Range, torch.Tensor]] = []
    position = batch.ranges[0].offset
    used = 0
    memory, gaps = staging.next_buffer(batch) if batch.staged_bytes or batch.has_gaps else (None, None)
    for each in batch.ranges:
        if each.offset > position:
            assert gaps is not None
            parts.append(gaps[: each.offset - position])
        if each.dims is None:
            item = each.dtype.itemsize
            parts.append(destinations[each.job].view(torch.uint8)[each.first * item : each.first * item + each.nbytes])
        else:
            assert memory is not None
            part = memory[used : used + each.nbytes]
            used += each.staged_bytes
            parts.append(part)
            copies.append((each, part))
        position = each.offset + each.nbytes
    past_cache = way.read(batch.file, batch.ranges[0].offset, parts, window, again=batch.read_again)
    staging.put(copies)
    return past_cache
