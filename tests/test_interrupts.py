"""Steps that no Ctrl-C takes apart: it is heeded when they are done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigmodel.atomic import atomic_file, folder_to_write
from bigmodel.interrupts import uninterrupted


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_is_heeded_at_the_end() -> None:
    done = []

    def steps() -> None:
        with uninterrupted():
            interrupt()
            done.append(1)
            with uninterrupted():
                interrupt()
                done.append(2)
            done.append(3)
        done.append(4)

    with pytest.raises(KeyboardInterrupt):
        steps()
    assert done == [1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_other_handlers_are_called_with_their_signals_and_stay() -> None:
    heard: list[int] = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == []
        assert heard == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_an_error_of_the_steps_stays_visible() -> None:
    def steps() -> None:
        with uninterrupted():
            interrupt()
            raise ValueError("mine")

    with pytest.raises(KeyboardInterrupt) as caught:
        steps()
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_take_no_part() -> None:
    seen: list[Any] = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def interrupting(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        interrupt()
        return real(*arguments, **named)

    return call


@pytest.mark.parametrize("late", ["unlink", "umask", "replace"])
def test_no_temporary_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    monkeypatch.setattr(os, late, interrupting(getattr(os, late)))

    def write() -> None:
        with folder_to_write(tmp_path / "new"), atomic_file(tmp_path / "new" / "file") as stream:
            stream.write(b"text")
            if late == "unlink":
                interrupt()

    with pytest.raises(KeyboardInterrupt):
        write()
    monkeypatch.undo()
    left = [path.name for path in tmp_path.rglob("*")]
    assert left == ([] if late == "unlink" else ["new", "file"])
    assert os.umask(umask) == umask
