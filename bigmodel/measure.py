"""How much memory a piece of work takes at its peak: for the demo, the benchmarks and the tests of memory."""

from __future__ import annotations

import threading
from types import TracebackType

from .devices import private_bytes

__all__ = ["PeakPrivateMemory"]


class PeakPrivateMemory:
    """Within a with block, samples this process's private memory in a thread.

    `peak_bytes` is the most that was there beyond the start, `kept_bytes` what is there beyond the start at the end. A peak that lasts less
    than `interval_seconds` may be missed.
    """

    def __init__(self, interval_seconds: float = 0.002) -> None:
        self.interval_seconds = interval_seconds
        self.start_bytes = 0
        self.peak_bytes = 0
        self.kept_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_seconds):
            self.peak_bytes = max(self.peak_bytes, private_bytes() - self.start_bytes)

    def __enter__(self) -> PeakPrivateMemory:
        self.start_bytes = private_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.kept_bytes = private_bytes() - self.start_bytes
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes)
