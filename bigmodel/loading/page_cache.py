"""What of a file the system already holds in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping

import numpy as np
import torch

from .location import CheckpointFile
from .mapping import map_privately

__all__ = ["PageCache"]


class PageCache:
    """Tells how much of a range of a file is in the page cache, without a byte being read.

    By mincore(2): preadv2 with RWF_NOWAIT would set off the very reads that it says it does not wait for. Linux answers only for files
    that belong to the user or may be written, and says of others that they are resident.
    """

    def __init__(self, descriptors: Mapping[CheckpointFile, int]) -> None:
        self._descriptors = descriptors
        self._mappings: dict[CheckpointFile, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._mincore = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None

    @property
    def can_tell(self) -> bool:
        """Whether this system has a way to ask."""
        return self._mincore is not None

    def share(self, file: CheckpointFile, offset: int, nbytes: int) -> float:
        """The part of the range's pages that is resident, 0 … 1; 1.0 where the system does not say."""
        if self._mincore is None:
            return 1.0
        with self._lock:
            if file not in self._mappings:
                # Private and never touched: an address for mincore, that of a file too big for RAM too.
                try:
                    self._mappings[file] = torch.frombuffer(map_privately(self._descriptors[file]), dtype=torch.uint8)
                except OSError:  # file systems and limits that allow no mapping
                    return 1.0
            mapped = self._mappings[file]
        first = offset // mmap.PAGESIZE
        end = min(offset + nbytes, mapped.numel())
        count = -(-end // mmap.PAGESIZE) - first
        if count <= 0:
            return 1.0
        pages = (ctypes.c_ubyte * count)()
        address = ctypes.c_void_p(mapped.data_ptr() + first * mmap.PAGESIZE)
        if self._mincore(address, ctypes.c_size_t(end - first * mmap.PAGESIZE), pages):
            return 1.0
        return int(np.count_nonzero(np.frombuffer(memoryview(pages), np.uint8) & 1)) / count
