"""Waiting for other threads, in a way that Ctrl-C always ends, and threads that nobody waits for."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

__all__ = ["LOOK_UP_SECONDS", "result_of", "start_daemon", "wait_until_done"]

LOOK_UP_SECONDS: Final = 0.1
"""Longest wait in one go. A signal that comes in the moment before a wait does not end it, so an endless one would miss Ctrl-C."""

FAREWELL_SECONDS: Final = 0.5
"""How long the end of the process waits for daemons, all together."""

Result = TypeVar("Result")

_daemons: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def result_of(future: Future[Result]) -> Result:
    """Waits for a result, or raises the error that came instead. Ctrl-C ends the wait, whenever it comes."""
    wait_until_done(future)
    return future.result()


def wait_until_done(future: Future[Result]) -> None:
    """Waits for the end of what makes the result, an error included. Ctrl-C ends the wait, whenever it comes."""
    while not future.done():
        wait([future], LOOK_UP_SECONDS)


def start_daemon(work: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that does not keep the process from ending, for work that may wait for ever: for a server, say.

    The interpreter ends such a thread when it next wants to run Python, which aborts the process when that is on the way out of torch's
    C++. So the process's end gives those who are at work a moment to come to theirs.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _daemons.add(thread)
    thread.start()
    return thread


@atexit.register
def _part_from_daemons() -> None:
    until = time.monotonic() + FAREWELL_SECONDS
    for thread in list(_daemons):
        thread.join(max(0.0, until - time.monotonic()))
