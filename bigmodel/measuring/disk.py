"""How fast files are read: from the disk, and out of the page cache."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from ..constants import MiB
from ..devices import available_host_bytes, reading_threads
from ..errors import MachineError
from ..machine import Rate
from ..waiting import submitted

__all__ = ["measure_disk"]

SCRATCH_BYTES: Final = 256 * MiB
"""Larger than what disks keep in caches of their own for one file, small enough for a second."""
LEAST_BYTES: Final = 16 * MiB
READ_BYTES: Final = 8 * MiB
"""One read, as loading reads."""
COLD_READS: Final = 3
WARM_READS: Final = 5
SLOW_SECONDS: Final = 1.5
"""A disk that takes this long for one pass is read no more often than once."""
GUESSED_COLD_PER_SECOND: Final = 2e9
"""Where the page cache cannot be emptied for a file: an NVMe drive of the third generation, as laptops have them."""


def measure_disk(folder: Path) -> tuple[Rate, Rate]:
    """Bytes per second from the disk of `folder`, and out of the page cache, both into memory of this process.

    A scratch file is written there and deleted again: 256 MiB, less where little is free. Raises `MachineError` where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        nbytes = min(SCRATCH_BYTES, shutil.disk_usage(folder).free // 4, available_host_bytes() // 8) // MiB * MiB
        if nbytes < LEAST_BYTES:
            raise MachineError(f"{folder}: less than {4 * LEAST_BYTES // MiB} MiB are free, too little to measure this disk with.")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".bigmodel-bench.", delete=False) as stream:
            file = Path(stream.name)
        try:
            return _measured(file, nbytes)
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: its disk cannot be measured: {error}. Name a folder that can be written to.") from error


def _measured(file: Path, nbytes: int) -> tuple[Rate, Rate]:
    noise = os.urandom(MiB)  # some file systems compress
    with file.open("wb", buffering=0) as stream:
        for _ in range(nbytes // MiB):
            stream.write(noise)
        os.fsync(stream.fileno())
    destination = memoryview(torch.zeros(nbytes, dtype=torch.uint8).numpy().data)
    with ThreadPoolExecutor(reading_threads()) as pool:
        cold: list[float] = []
        while len(cold) < COLD_READS and sum(cold) < SLOW_SECONDS and _dropped_from_page_cache(file):
            cold.append(_pass_seconds(file, destination, pool))
        warm = statistics.median([_pass_seconds(file, destination, pool) for _ in range(1 + WARM_READS)][1:])
    page_cache = Rate(nbytes / warm, "measured")
    return (Rate(nbytes / statistics.median(cold), "measured") if cold else Rate(GUESSED_COLD_PER_SECOND, "guess")), page_cache


def _dropped_from_page_cache(file: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _pass_seconds(file: Path, destination: memoryview, pool: ThreadPoolExecutor) -> float:
    starts = iter(range(0, destination.nbytes, READ_BYTES))
    started = time.perf_counter()
    for done in [submitted(lambda: pool, _read, file, destination, starts) for _ in range(pool._max_workers)]:
        done.result()
    return time.perf_counter() - started


def _read(file: Path, destination: memoryview, starts: Iterator[int]) -> None:
    with file.open("rb", buffering=0) as stream:
        for start in starts:  # taking the next number of a range is one step of the interpreter: threads may share it
            stream.seek(start)
            part = destination[start : start + READ_BYTES]
            while part:
                part = part[stream.readinto(part) :]
