"""The threads that read, the same ones for the whole process, each doing its own arithmetic on one core."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from ..devices import reading_threads
from ..waiting import not_awaited, result_of, start_daemon

__all__ = ["Crew", "direct_reading_threads", "in_order", "spare_workers", "workers"]

MIN_WORKERS: Final = 8
"""Reads past the page cache mostly wait, and disks want several requests at once, whatever the number of cores."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_pools: dict[str, ThreadPoolExecutor] = {}


def workers() -> ThreadPoolExecutor:
    """`devices.reading_threads` many, for whatever keeps a core busy. A forked child gets its own.

    No more than that, for what a thread has freed stays with it: work that goes round among many keeps memory for each.
    """
    return _pool("bigmodel-read", reading_threads())


def spare_workers() -> ThreadPoolExecutor:
    """The others of the `direct_reading_threads`, if those are more. They only wait for disks."""
    return _pool("bigmodel-spare", direct_reading_threads() - reading_threads())


def direct_reading_threads() -> int:
    """Threads that read past the page cache at once."""
    return max(MIN_WORKERS, reading_threads())


def _pool(name: str, count: int) -> ThreadPoolExecutor:
    with _lock:
        pool = _pools.get(name)
        if pool is None:
            pool = _pools[name] = _started(count, name)
        return pool


def _started(count: int, name: str) -> ThreadPoolExecutor:
    """Starts all threads at once.

    A cast inside a reading thread must not ask OpenMP for more threads: with one reader a core they would only wait for each other. torch
    keeps the number per thread but remembers the last one set as the default of threads to come, so it is set back here, once.
    """
    ready = threading.Barrier(count + 1)

    def single_threaded() -> None:
        torch.get_num_threads()  # torch's own first-use initialisation would undo the next line later
        torch.set_num_threads(1)
        ready.wait()

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    try:
        for _ in range(count):
            pool.submit(single_threaded)
        ready.wait()
        torch.set_num_threads(before)
    except BaseException:
        # Ctrl-C: threads that wait for the others would wait for ever, and the process for them.
        ready.abort()
        pool.shutdown(wait=False)
        raise
    return pool


def _renew_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


class Crew:
    """The threads that carry out one piece of work, each of which runs its part within `at_work`.

    Futures cannot tell who is still at it: Ctrl-C may come while they are handed out, and lose one.
    """

    def __init__(self) -> None:
        self.stopped = False
        """Whether whoever is at work shall take nothing new."""
        self._count = 0
        self._condition = threading.Condition()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """For one thread's part. An error in it stops the others."""
        with self._condition:
            self._count += 1
        try:
            yield
        except BaseException:
            self.stopped = True
            raise
        finally:
            with self._condition:
                self._count -= 1
                self._condition.notify_all()

    def stop(self) -> None:
        """Returns when nobody is at work any more; who comes later finds that it has stopped."""
        self.stopped = True
        with self._condition:
            while self._count:
                self._condition.wait()


def in_order(work: Callable[[Item], Result], items: Sequence[Item], most: int) -> list[Result]:
    """What `work` makes of each item, by at most `most` threads at once.

    An error (that of the first item with one) and Ctrl-C are raised at once: nothing is begun any more, and nobody waits for what is under
    way, a server's answer or the end of a long file. So what `work` changes must be right however far it has come.
    """
    futures: list[Future[Result]] = [Future() for _ in items]
    left = iter(list(zip(futures, items, strict=True)))

    def run() -> None:
        for future, item in left:
            try:
                with not_awaited():
                    result = work(item)
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

    try:
        for _ in range(min(most, len(items))):
            start_daemon(run, "bigmodel-order")
        return [result_of(future) for future in futures]
    finally:
        for _ in left:
            pass  # nobody finds anything to begin
