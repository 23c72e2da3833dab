"""Pausing Python's cycle collector where many long-lived objects are made at once: it would look through all of them again and again."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["without_collecting"]

_lock = threading.Lock()
_users = 0
_was_enabled = False


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Within the block, in all threads, reference cycles are not searched for; afterwards they are, if they were before."""
    global _users, _was_enabled
    with _lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                gc.enable()
