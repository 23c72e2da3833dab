"""Memory that nobody has written to yet, made ready a moment before it is filled, by the cheapest kind of page that the system has.

Giving a process its pages costs more than filling them from the page cache: on one machine 0.36 ms a MiB for pages of 4 KiB, 0.05 for pages
of 2 MiB (huge pages, which Linux gives on request). But in a virtual machine whose host takes free memory back, 2 MiB in one piece are just
what it has taken, and cost 2.3 ms a MiB. No setting tells one from the other, so both are tried and timed.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

import torch

__all__ = ["FirstTouch"]

BLOCK_BYTES: Final = 2 << 20
"""Of a huge page, on most systems. Where they are bigger, the system takes no notice of what is asked for a block."""
WORTHWHILE_BYTES: Final = 16 << 20
"""Destinations smaller than this together are filled without further ado."""
PATIENCE_BYTES: Final = 8 << 20
"""How much memory comes in ordinary pages, at the least, after huge ones were dearer."""
POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE, Linux 5.14: gives pages their memory without a fault for each. Existing contents stay."""


class _Kinds:
    """Decides between ordinary and huge pages by what each has cost. Not safe for several threads.

    After huge pages that were dearer come ordinary ones for a while, which doubles as long as that does not change.
    """

    def __init__(self) -> None:
        self._ordinary = math.nan
        self._huge = math.nan
        """Seconds per byte, of the last pages of that kind."""
        self._patience_bytes = PATIENCE_BYTES
        self._waited_bytes = 0

    def choose(self, nbytes: int) -> bool:
        """Whether the next `nbytes` shall be huge pages."""
        if math.isnan(self._ordinary):
            return False
        if math.isnan(self._huge) or self._huge <= self._ordinary:
            return True
        if self._waited_bytes < self._patience_bytes:
            self._waited_bytes += nbytes
            return False
        self._waited_bytes = 0
        return True

    def tell(self, huge: bool, nbytes: int, seconds: float) -> None:
        """What `nbytes` of a kind have cost."""
        if not huge:
            self._ordinary = seconds / nbytes
            return
        self._huge = seconds / nbytes
        if self._huge > self._ordinary:
            self._patience_bytes *= 2
        else:
            self._patience_bytes = max(PATIENCE_BYTES, self._patience_bytes // 2)


class FirstTouch:
    """Gives destinations on the host their memory, block by block, when the first thread is about to write to a block.

    Only whole blocks within destinations become huge pages, so no more memory is taken than the destinations have. For several threads at
    once. Does nothing where the system cannot be asked.
    """

    def __init__(self, destinations: Iterable[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._claimed: set[int] = set()
        self._kinds = _Kinds()
        self._lock = threading.Lock()
        self._madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
        places = sorted(
            (each.data_ptr(), each.data_ptr() + each.nbytes) for each in destinations if each.device.type == "cpu" and each.nbytes
        )
        if self._madvise is None or sum(end - start for start, end in places) < WORTHWHILE_BYTES:
            return
        for start, end in places:
            # Allocations that are neighbours share the page in which one ends and the other begins, or lie on neighbouring pages.
            start, end = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def prepare(self, part: torch.Tensor) -> None:
        """To be called before contiguous elements of a destination are written."""
        if not self._starts:
            return
        start = part.data_ptr()
        number = bisect.bisect_right(self._starts, start) - 1
        if number < 0 or start >= self._ends[number]:
            return
        first, last = start // BLOCK_BYTES, (start + part.nbytes - 1) // BLOCK_BYTES
        for begin, end in self._claim(first, last, self._starts[number], self._ends[number]):
            self._populate(begin, end)

    def _claim(self, first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Those of the blocks, within an area, that no thread has taken."""
        for block in range(first, last + 1):
            with self._lock:
                if block in self._claimed:
                    continue
                self._claimed.add(block)
            yield max(start, block * BLOCK_BYTES), min(end, (block + 1) * BLOCK_BYTES)

    def _populate(self, start: int, end: int) -> None:
        nbytes = end - start
        whole = nbytes == BLOCK_BYTES
        with self._lock:
            huge = whole and self._kinds.choose(nbytes)
        if huge:
            self._advise(start, nbytes, mmap.MADV_HUGEPAGE)
        # Processor time: whoever has to wait for a core has learned nothing of pages.
        before = time.thread_time()
        is_given = self._advise(start, nbytes, POPULATE_WRITE)
        seconds = time.thread_time() - before
        if whole and is_given:  # an older kernel cannot be timed like this: pages stay ordinary there
            with self._lock:
                self._kinds.tell(huge, nbytes, seconds)

    def _advise(self, start: int, nbytes: int, advice: int) -> bool:
        """Whether the system did as it was told. Where not, memory gets ready when it is written."""
        assert self._madvise is not None
        refused: int = self._madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
        return refused == 0
