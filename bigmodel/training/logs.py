"""Logging and progress bars of several processes: one line or bar where every process would write the same."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from tqdm.auto import tqdm as every_bar

from ..settings import read_variable
from .environment import RANK_VARIABLES, get_int_from_env
from .state import PartialState

__all__ = ["ProcessLogger", "get_logger", "tqdm"]


class ProcessLogger(logging.LoggerAdapter):
    """A logger that the main process alone writes to, unless a call says otherwise; messages begin with the process's rank, `[RANK 0] `.

    Every logging method takes, beside its own arguments, `main_process_only` (default True) and `in_order` (default False): all processes
    write, one after the other by rank; each of them must make the call then.
    """

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, in_order: bool = False, **kwargs: Any
    ) -> None:
        """`logging.Logger.log` on the processes that are asked to."""
        if not self.isEnabledFor(level):
            return
        if in_order and PartialState._shared_state:
            state = PartialState()
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self._write(level, msg, args, kwargs)
                state.wait_for_everyone()
        elif in_order or not main_process_only or _rank() == 0:
            self._write(level, msg, args, kwargs)

    def _write(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Three frames lie between the caller and the logger: this, `log`, and mostly `info` or its kin.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message behind this process's rank, and the call's own `extra`."""
        return f"[RANK {_rank()}] {msg}", kwargs

    @functools.cache  # noqa: B019 - loggers live as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """`warning`, the first time that it is called with these arguments."""
        self.warning(*args, **kwargs)


def _rank() -> int:
    # What is logged before anything of training is made must not start a process group.
    return PartialState().process_index if PartialState._shared_state else get_int_from_env(RANK_VARIABLES, 0)


def get_logger(name: str, log_level: str | None = None) -> ProcessLogger:
    """The logger `name` for jobs of several processes.

    Args:
        log_level: `"DEBUG"`, `"INFO"`, … for this logger and, where nothing is set there, the root; None: `BIGMODEL_LOG_LEVEL`, else
            what is set already.

    Raises `ValueError` for an unknown level.
    """
    logger = logging.getLogger(name)
    level = log_level or read_variable("LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return ProcessLogger(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A `tqdm.auto.tqdm` that is shown by the first process of each host only, unless `main_process_only` is False."""
    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return every_bar(*args, **kwargs)
