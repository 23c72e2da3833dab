"""How bytes leave a file: out of the page cache where they are there, past it where the disk is faster than the cache can be filled."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch

from ..devices import available_host_bytes
from ..errors import CheckpointError
from .files import OpenFiles, read_scattered
from .fresh_memory import memory_in_one_piece
from .host_memory import as_memory
from .location import CheckpointFile
from .page_cache import PageCache

__all__ = ["READINGS", "WINDOW_BYTES", "Reading", "Way"]

Reading = Literal["auto", "buffered", "direct"]
"""`"buffered"` goes through the page cache, `"direct"` past it (O_DIRECT), `"auto"` decides by what it measures."""
READINGS: Final = ("auto", "buffered", "direct")

WINDOW_BYTES: Final = 2 << 20
"""Longest direct read: it stays in a core's cache until it is copied to where it belongs, and fits a huge page."""
BLOCK_BYTES: Final = 4096
"""Direct reads begin and end at multiples of this, in the file and in memory: no disk asks for more."""
SAMPLE_BYTES: Final = 64 << 20
"""Read past the page cache before the disk's rate is taken for known."""
FAST_BYTES_PER_SECOND: Final = 0.6e9
"""A disk below this rate is no slower through the page cache, and what it leaves there makes the next load fast. Above it, filling the
cache (a page found, a page copied, and in a virtual machine a page taken from the host) takes more time than the disk."""
RESIDENT_SHARE: Final = 0.5
"""A range of which this much is in the page cache is read through it."""
REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class Way:
    """One call's way of reading files, shared by its threads. Whatever a file system refuses is read through the page cache."""

    def __init__(self, reading: Reading, files: OpenFiles, descriptors: Mapping[CheckpointFile, int], total_bytes: int) -> None:
        self._files = files
        self._descriptors = descriptors
        self._measures = reading == "auto"
        self._cache = PageCache(descriptors) if reading == "auto" else None
        self._past_cache = hasattr(os, "O_DIRECT") and (reading == "direct" or (self._cache is not None and self._cache.can_tell))
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._sampled_bytes = 0

    @property
    def is_buffered(self) -> bool:
        """Whether all reads from now on go through the page cache."""
        return not self._past_cache

    def read(self, file: CheckpointFile, offset: int, parts: Sequence[torch.Tensor], window: torch.Tensor | None, *, again: bool) -> bool:
        """Fills `parts` (flat, uint8, on CPU) one after the other from `offset` on. Raises `CheckpointError` at the file's end.

        Returns whether they came past the page cache.

        `window` is staging memory from `new_window`, needed unless `is_buffered`. `again`: other reads want the same bytes, so they had
        better be in the page cache.
        """
        descriptor = self._descriptors[file]
        buffers = [as_memory(part) for part in parts]
        if window is not None and not again:
            past_cache = self._descriptor_past(file, offset, sum(buffer.nbytes for buffer in buffers))
            if past_cache is not None and self._past(past_cache, file, offset, parts, window):
                return True
        read_scattered(descriptor, buffers, offset, file)
        return False

    def read_window(self, file: CheckpointFile, offset: int, nbytes: int, window: torch.Tensor) -> torch.Tensor | None:
        """The bytes of the file from `offset` on, within `window`, where they can be had so: past the page cache, in one read."""
        begin = offset - offset % BLOCK_BYTES
        wanted = -(-(offset + nbytes - begin) // BLOCK_BYTES) * BLOCK_BYTES
        descriptor = None if wanted > window.numel() else self._descriptor_past(file, offset, nbytes)
        count = None if descriptor is None else self._count_past(descriptor, file, begin, window[:wanted])
        if count is None or count < offset + nbytes - begin:
            return None
        return window[offset - begin : offset - begin + nbytes]

    def _descriptor_past(self, file: CheckpointFile, offset: int, nbytes: int) -> int | None:
        """For reads past the page cache; None where these bytes are in it, or had better come through it."""
        if not self._past_cache or (self._cache is not None and self._cache.share(file, offset, nbytes) >= RESIDENT_SHARE):
            return None
        return self._files.past_cache(file)

    def _past(self, descriptor: int, file: CheckpointFile, offset: int, parts: Sequence[torch.Tensor], window: torch.Tensor) -> bool:
        """Reads past the page cache. False where the file system refuses that."""
        end = offset + sum(part.numel() for part in parts)
        rest = list(parts)
        while offset < end:
            begin = offset - offset % BLOCK_BYTES
            wanted = min(window.numel(), -(-(end - begin) // BLOCK_BYTES) * BLOCK_BYTES)
            count = self._count_past(descriptor, file, begin, window[:wanted])
            if count is None:
                return False
            found = window[offset - begin : min(count, end - begin)]
            if found.numel() == 0:
                raise CheckpointError(f"{file}: truncated: expected {end} bytes, the file ends at {begin + count}.")
            offset += found.numel()
            while found.numel():
                part = rest[0][: found.numel()]
                part.copy_(found[: part.numel()])
                found, rest[0] = found[part.numel() :], rest[0][part.numel() :]
                if rest[0].numel() == 0:
                    del rest[0]
        return True

    def _count_past(self, descriptor: int, file: CheckpointFile, begin: int, memory: torch.Tensor) -> int | None:
        """Bytes that one read brought, fewer only at the file's end; None where the file system refuses."""
        self._started()
        count = 0
        try:
            count = os.preadv(descriptor, [as_memory(memory)], begin)
        except OSError as error:
            if error.errno not in REFUSED:
                raise CheckpointError(f"{file}: cannot be read at byte {begin}: {error}.") from error
            self._files.refuse_past_cache(file)
            return None
        finally:
            self._finished(count)
        return count

    def _started(self) -> None:
        with self._lock:
            if self._in_flight == 0:
                self._busy_since = time.perf_counter()
            self._in_flight += 1

    def _finished(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_seconds += time.perf_counter() - self._busy_since
            self._sampled_bytes += nbytes
            if not self._measures or self._sampled_bytes < SAMPLE_BYTES:
                return
            now = time.perf_counter()
            seconds = self._busy_seconds + (now - self._busy_since if self._in_flight else 0.0)
            self._measures = False
            if self._sampled_bytes < FAST_BYTES_PER_SECOND * seconds and self._total_bytes < available_host_bytes():
                self._past_cache = False

    @staticmethod
    def new_window() -> torch.Tensor:
        """Staging memory of `WINDOW_BYTES` that direct reads may fill."""
        return memory_in_one_piece(WINDOW_BYTES)
