"""Steps that belong together, which no Ctrl-C takes apart."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

__all__ = ["uninterrupted"]

HANDLED: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
)
"""What programs have handlers for that may raise: Ctrl-C, the end that a shell or a scheduler announces, clocks."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What the handlers of signals would do to this thread (raise `KeyboardInterrupt`, say) they do when the block has ended.

    For short steps that have to be taken together: Ctrl-C waits for their end. Python runs handlers in the main thread alone, so in other
    threads there is nothing to put off. A signal without a handler of Python's does what it always does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {}
    came: list[tuple[int, FrameType | None]] = []
    is_over = False

    def put_off(number: int, frame: FrameType | None) -> None:
        if is_over:
            handlers[number](number, frame)
        else:
            came.append((number, frame))

    try:
        for number in HANDLED:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, put_off)
        yield
    finally:
        is_over = True
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        finally:
            for number, frame in came:
                handlers[number](number, frame)
