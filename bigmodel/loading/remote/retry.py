"""How often and after how long something that failed on the network is tried again."""

from __future__ import annotations

import random
import threading
import time
from typing import Final

__all__ = ["ATTEMPTS", "TRANSIENT", "wait"]

ATTEMPTS: Final = 6
"""Attempts in a row that bring no byte before a file is given up."""
FIRST_WAIT_SECONDS: Final = 0.5
TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers of a server that may be others soon (HTTP status codes)."""
LONGEST_WAIT_SECONDS: Final = 60.0


def wait(failures: int, asked_seconds: float | None, stop: threading.Event | None) -> None:
    """Waits before the next attempt: as long as the server asked for, or twice as long as before; with `stop`, not a moment longer.

    A random part keeps many readers that were turned away together from coming back together.
    """
    seconds = FIRST_WAIT_SECONDS * 2 ** (failures - 1) if asked_seconds is None else asked_seconds
    seconds = min(seconds, LONGEST_WAIT_SECONDS) * random.uniform(0.75, 1.25)
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)
