"""Waiting for other threads, in a way that Ctrl-C always ends."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Final, TypeVar

__all__ = ["LOOK_UP_SECONDS", "result_of", "wait_until_done"]

LOOK_UP_SECONDS: Final = 0.1
"""Longest wait in one go. A signal that comes in the moment before a wait does not end it, so an endless one would miss Ctrl-C."""

Result = TypeVar("Result")


def result_of(future: Future[Result]) -> Result:
    """Waits for a result, or raises the error that came instead. Ctrl-C ends the wait, whenever it comes."""
    wait_until_done(future)
    return future.result()


def wait_until_done(future: Future[Result]) -> None:
    """Waits for the end of what makes the result, an error included. Ctrl-C ends the wait, whenever it comes."""
    while not future.done():
        wait([future], LOOK_UP_SECONDS)
