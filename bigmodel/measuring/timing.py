"""The one stopwatch: medians of repeated work, with a device's queue empty before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from ..devices import synchronize

__all__ = ["median_seconds"]

LEAST_REPETITIONS: Final = 3
MOST_REPETITIONS: Final = 50
ENOUGH_SECONDS: Final = 0.1


def median_seconds(work: Callable[[], object], device: torch.device, *, warm_up: bool = True, at_once: int = 1) -> float:
    """Seconds of one `work`: the median of as many repetitions as fit into a tenth of a second, at least three.

    `at_once` runs are queued before the device is waited for, so that waiting does not count. The first run is not counted with `warm_up`.
    """
    if warm_up:
        work()
    seconds: list[float] = []
    while len(seconds) < LEAST_REPETITIONS or (sum(seconds) * at_once < ENOUGH_SECONDS and len(seconds) < MOST_REPETITIONS):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(at_once):
            work()
        synchronize(device)
        seconds.append((time.perf_counter() - started) / at_once)
    return max(1e-9, statistics.median(seconds))  # a clock of coarse steps may show none
