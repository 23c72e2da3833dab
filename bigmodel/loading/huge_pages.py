"""Huge pages for memory that is about to be written for the first time.

Giving a process its pages costs more than filling them from the page cache: on one machine 0.36 ms a MiB for pages of 4 KiB, 0.05 for pages
of 2 MiB, which Linux gives on request. But where the host of a virtual machine takes free memory back ("free page reporting" in Linux's
documentation of memory management), blocks of 2 MiB are just what it has taken, and cost 2.3 ms a MiB until the host has given them again.
The system says whether it reports free blocks and from which size on.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

__all__ = ["ask_for_huge_pages"]

BLOCK_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
"""Bytes of a huge page. Not there where the system has none."""
REPORTED_ORDER: Final = Path("/sys/module/page_reporting/parameters/page_reporting_order")
"""Free blocks of two to the power of this many pages are reported to the host. Higher than any block while nobody asks for reports."""


def ask_for_huge_pages(destinations: Iterable[torch.Tensor]) -> None:
    """Tells the system that contiguous destinations on the host shall have huge pages, where that is cheap.

    Only pages that lie within a destination, so that no more memory is taken than destinations have. What they hold stays.
    """
    block_bytes = _cheap_block_bytes()
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if not block_bytes or madvise is None:
        return
    for each in destinations:
        if each.device.type != "cpu":
            continue
        start = -(-each.data_ptr() // block_bytes) * block_bytes
        end = (each.data_ptr() + each.nbytes) // block_bytes * block_bytes
        if start < end:
            # A system that refuses gives ordinary pages.
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_HUGEPAGE))


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
