"""Waiting for other threads ends with their result, their error, or Ctrl-C, whenever that comes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as real_wait
from typing import Any

import pytest

from bigmodel import waiting
from bigmodel.waiting import result_of, wait_until_done


def test_results_and_errors() -> None:
    gate = threading.Event()

    def late(value: int) -> float:
        assert gate.wait(100)
        return 1 / value

    with ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(late, 2), pool.submit(late, 0)
        threading.Timer(0.01, gate.set).start()
        assert result_of(good) == 0.5
        wait_until_done(bad)
        with pytest.raises(ZeroDivisionError):
            result_of(bad)


def test_an_error_of_time_is_not_taken_for_the_end_of_a_wait() -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError("of the server"))
    with pytest.raises(TimeoutError, match="of the server"):
        result_of(future)


@pytest.mark.parametrize("wait", [result_of, wait_until_done])
def test_a_signal_in_the_moment_before_a_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    future: Future[int] = Future()
    timer = threading.Timer(100, future.set_result, [0])  # so that an endless wait fails and does not hang
    timer.start()

    def wait_and_then_look_up(*arguments: Any) -> None:
        real_wait(*arguments)
        raise KeyboardInterrupt  # as the interpreter does once the wait is over

    monkeypatch.setattr(waiting, "wait", wait_and_then_look_up)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait(future)
        assert not future.done()
    finally:
        timer.cancel()


DAEMONS = r"""
import os, sys, threading, time
import torch
from bigmodel.waiting import not_awaited, start_daemon

def wait_for_a_server():
    with not_awaited():
        threading.Event().wait()

def compute():
    until = time.monotonic() + float(sys.argv[1])
    values = torch.ones(1000)
    while time.monotonic() < until:
        for _ in range(100):
            values.mul(1.0)
    os.write(1, b"done\n")

start_daemon(wait_for_a_server, "silent")
for _ in range(3):
    start_daemon(compute, "computing")
time.sleep(0.05)
print("end", flush=True)
"""


@pytest.mark.parametrize("seconds", [0.2, 2.0])
def test_the_end_of_the_process_lets_daemons_leave_torch_and_does_not_wait_for_silent_ones(seconds: float) -> None:
    assert seconds < waiting.COMPUTING_SECONDS
    run = subprocess.run([sys.executable, "-c", DAEMONS, str(seconds)], capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["end", "done", "done", "done"]
    assert not run.stderr


INTERRUPTED = r"""
import threading
from bigmodel.waiting import start_daemon

starts, real = [], threading.Thread.start

def start(self):
    starts.append(self)
    if len(starts) == 1:
        raise KeyboardInterrupt  # before the thread is there
    real(self)
    raise KeyboardInterrupt

threading.Thread.start = start
for _ in range(2):
    try: start_daemon(threading.Event().wait, "silent")
    except KeyboardInterrupt: print("interrupted")
"""


def test_ctrl_c_while_a_daemon_starts_leaves_the_end_of_the_process_in_order() -> None:
    program = "from bigmodel import waiting\nwaiting.COMPUTING_SECONDS = 0.2\n" + INTERRUPTED
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stdout, run.stderr) == (0, "interrupted\ninterrupted\n", "")


def test_a_forked_child_does_not_wait_for_its_parents_daemons() -> None:
    program = (
        "import os, sys, threading\n"
        "from bigmodel import waiting\n"
        "waiting.COMPUTING_SECONDS = 1000.0\n"
        "started, end = threading.Event(), threading.Event()\n"
        "waiting.start_daemon(lambda: (started.set(), end.wait()), 'silent')\n"
        "started.wait()\n"
        "child = os.fork()\n"
        "if child: print(os.waitpid(child, 0)[1], flush=True); end.set()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr
