"""Waiting for other threads, in a way that Ctrl-C always ends, and threads that nobody waits for."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import Any, Final, TypeVar

__all__ = ["LOOK_UP_SECONDS", "not_awaited", "result_of", "start_daemon", "submitted", "wait_until_done"]

LOOK_UP_SECONDS: Final = 0.1
"""Longest wait in one go. A signal that comes in the moment before a wait does not end it, so an endless one would miss Ctrl-C."""

FAREWELL_SECONDS: Final = 0.5
"""How long the end of the process waits for threads that nobody waits for, all together."""
COMPUTING_SECONDS: Final = 10.0
"""How long it waits for daemons that are at arithmetic: they end by themselves, but on a machine with much to do not at once."""

Result = TypeVar("Result")

_daemons: set[threading.Thread] = set()
"""Those at work. Python's own sets may be changed by several threads."""
_not_awaited: set[threading.Thread] = set()
_is_ending = False


def result_of(future: Future[Result]) -> Result:
    """Waits for a result, or raises the error that came instead. Ctrl-C ends the wait, whenever it comes."""
    wait_until_done(future)
    return future.result()


def wait_until_done(future: Future[Result]) -> None:
    """Waits for the end of what makes the result, an error included. Ctrl-C ends the wait, whenever it comes."""
    while not future.done():
        wait([future], LOOK_UP_SECONDS)


def submitted(pool: Callable[[], Executor], work: Callable[..., Result], *arguments: Any, **named: Any) -> Future[Result]:
    """Hands work to the threads of `pool()`; where these take nothing any more, it is done here and now.

    Python ends all pools when the main thread has come to its end, while other threads of the program, and functions of `atexit`, go on.
    """
    try:
        return pool().submit(work, *arguments, **named)
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
    done: Future[Result] = Future()
    try:
        done.set_result(work(*arguments, **named))
    except Exception as error:
        done.set_exception(error)
    return done


def start_daemon(work: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that does not keep the process from ending, for work that may wait for ever: for a server, say.

    The interpreter ends such a thread when it next wants to run Python, which aborts the process when that is on the way out of torch's
    C++. So the process's end gives those who are at work time to come to theirs; where they wait for others, they say so (`not_awaited`).
    After that, and where no thread can be had, the work is done by the caller's own.
    """

    def run() -> None:
        # Ctrl-C may come while threads start, so only the thread itself knows that it has.
        thread = threading.current_thread()
        _daemons.add(thread)
        try:
            if not _is_ending:
                work()
        finally:
            _daemons.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if not _is_ending:
        with contextlib.suppress(RuntimeError):
            thread.start()
            return thread
    work()
    return threading.current_thread()


@contextlib.contextmanager
def not_awaited() -> Iterator[None]:
    """For the part of a daemon's work that may take for ever, and does not compute: the process ends without it."""
    thread = threading.current_thread()
    _not_awaited.add(thread)
    try:
        yield
    finally:
        _not_awaited.discard(thread)


@atexit.register
def _part_from_daemons() -> None:
    global _is_ending
    _is_ending = True
    until = time.monotonic() + COMPUTING_SECONDS
    # A forked child has its parent's daemons on the list, none of them alive.
    while (computing := [thread for thread in _daemons - _not_awaited if thread.is_alive()]) and time.monotonic() < until:
        computing[0].join(LOOK_UP_SECONDS)
    until = time.monotonic() + FAREWELL_SECONDS
    for thread in list(_daemons):
        thread.join(max(0.0, until - time.monotonic()))
