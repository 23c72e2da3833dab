"""One progress bar for long work: in bytes or steps, on the main process only, with a switch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
from tqdm import tqdm

from .settings import environment_flag

__all__ = ["Progress", "ProgressCallback"]

ProgressCallback = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def _is_main_process() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


class Progress:
    """A progress bar in bytes (or in steps, where `unit` names them), safe to be advanced from several threads.

    `total_bytes`, `done_bytes` and `advance` count steps then. `show=None` shows it on an interactive terminal, unless `BIGMODEL_QUIET=1`;
    no process but the main one (rank 0 of torch's process group, else of `RANK`) ever shows it. `callback(done_bytes, total_bytes)` is
    called at every step whether or not the bar is shown.
    """

    def __init__(
        self,
        total_bytes: int,
        description: str,
        *,
        show: bool | None = None,
        callback: ProgressCallback | None = None,
        unit: str = "B",
    ) -> None:
        if show is None:
            show = sys.stderr.isatty() and not environment_flag("QUIET")
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._callback = callback
        self._lock = threading.Lock()
        self._bar = tqdm(
            total=total_bytes,
            desc=description,
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024,
            disable=not (show and _is_main_process()),
        )

    def advance(self, nbytes: int) -> None:
        """Adds `nbytes` to what is done."""
        with self._lock:
            self.done_bytes += nbytes
            self._bar.update(nbytes)
            if self._callback is not None:
                self._callback(self.done_bytes, self.total_bytes)

    def close(self) -> None:
        """Takes the bar off the screen's live line."""
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
