"""Threads that read: results in order, errors and Ctrl-C at once, nothing that waits for ever."""

from __future__ import annotations

import threading

import pytest

from bigmodel.loading import workers
from bigmodel.loading.workers import in_order


def test_results_come_in_the_order_of_the_items() -> None:
    gate = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert gate.wait(100)
        if item == 9:
            gate.set()
        return item * item

    assert in_order(work, range(10), 3) == [item * item for item in range(10)]
    assert in_order(work, [], 3) == []


def test_the_error_is_that_of_the_first_item_with_one_and_nobody_waits_for_the_rest() -> None:
    failed, release = threading.Event(), threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            assert failed.wait(100)
            raise ValueError("first")
        if item == 1:
            failed.set()
            raise ValueError("second")
        release.wait()

    try:
        with pytest.raises(ValueError, match="first"):
            in_order(work, range(100), 3)
    finally:
        release.set()
    for thread in threading.enumerate():
        if thread.name == "bigmodel-order":
            thread.join(100)
    assert len(begun) < 10


def test_ctrl_c_while_reading_threads_start_leaves_none_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().wait(timeout)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading, "Barrier", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers._started(3, "started-for-a-test")
    for thread in set(threading.enumerate()) - before:
        thread.join(100)
        assert not thread.is_alive()
