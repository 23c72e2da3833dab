"""Memory that is about to be written for the first time: giving it to the process costs more than filling it from the page cache.

Page by page, as each is first touched, it took 0.36 ms a MiB on one machine. Linux gives pages of 2 MiB on request, for 0.05. But where the
host of a virtual machine takes free memory back ("free page reporting" in Linux's documentation of memory management), blocks of 2 MiB are
just what it has taken, and cost 2.3 ms a MiB until the host has given them again. The system says whether it reports free blocks and from
which size on. Where pages are small, many are asked for in one go, which spares the process an exception for each.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["ask_for_huge_pages", "memory_in_one_piece", "take_pages"]

BLOCK_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
"""Bytes of a huge page. Not there where the system has none."""
REPORTED_ORDER: Final = Path("/sys/module/page_reporting/parameters/page_reporting_order")
"""Free blocks of two to the power of this many pages are reported to the host. Higher than any block while nobody asks for reports."""

LEAST_BYTES: Final = 64 << 10
"""Of memory that is asked for in one go; for less the question takes as long as the pages."""
POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of madvise(2), in Linux since 5.14; it changes nothing that memory holds."""

_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def ask_for_huge_pages(destinations: Iterable[torch.Tensor]) -> None:
    """Tells the system that contiguous destinations on the host shall have huge pages, where that is cheap.

    Only pages that lie within a destination, so that no more memory is taken than destinations have. What they hold stays.
    """
    block_bytes = _cheap_block_bytes()
    if not block_bytes or _madvise is None:
        return
    for each in destinations:
        if each.device.type != "cpu":
            continue
        start = -(-each.data_ptr() // block_bytes) * block_bytes
        end = (each.data_ptr() + each.nbytes) // block_bytes * block_bytes
        if start < end:
            # A system that refuses gives ordinary pages.
            _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_HUGEPAGE))


def take_pages(destination: torch.Tensor, first: int, count: int) -> None:
    """Has the system give the memory of `count` elements of a flat tensor on the host, from the `first` on, to the process in one go."""
    nbytes = count * destination.itemsize
    if _madvise is None or nbytes < LEAST_BYTES:
        return
    start = destination.data_ptr() + first * destination.itemsize
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    # A system that refuses (older ones do not know the question) gives each page at its first touch.
    _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(start + nbytes - begin), ctypes.c_int(POPULATE_WRITE))


def memory_in_one_piece(nbytes: int) -> torch.Tensor:
    """Zeros (uint8) on the host for a disk to write to, their addresses in one piece for the disk too, as far as the system has such.

    A disk that is told of each page of 4 KiB apart takes its time for it: one of a virtual machine read 1.3 GiB/s so, and 3.4 into huge
    pages. Few are needed, so they are asked for whatever they cost; what is never read into is never taken.
    """
    block_bytes = _number(BLOCK_SIZE)
    if block_bytes is None or _madvise is None:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    area = torch.frombuffer(mmap.mmap(-1, nbytes + block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    skipped = -area.data_ptr() % block_bytes
    memory = area[skipped : skipped + nbytes]
    _madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), ctypes.c_int(mmap.MADV_HUGEPAGE))
    return memory


def _cheap_block_bytes() -> int:
    """Bytes of a huge page; 0 where there are none, or where the host may have taken them."""
    block_bytes = _number(BLOCK_SIZE)
    reported = _number(REPORTED_ORDER)
    if block_bytes is None or (reported is not None and mmap.PAGESIZE << min(reported, 64) <= block_bytes):
        return 0
    return block_bytes


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
