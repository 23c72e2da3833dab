"""Processes joined in one gloo group: a test sends a function to all ranks and gets what each returns.

They live as long as the test session, and are forked from a server that has imported torch once: that takes a second, then a new set of
them a tenth. A rank that fails, ends or hangs costs its set, not the session: it is killed, and the next call has a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_SECONDS = 60.0
"""How long a call may take."""

GRACE_SECONDS = 5.0
"""How long the other ranks may go on once one has failed: most of them wait for it in a collective."""

PRELOADED = ["torch", "torch.distributed.fsdp", "torch._dynamo", "pytest", "bigmodel.training.state"]
"""What the server imports once; dynamo comes with the first optimizer or `DistributedDataParallel`."""

# Classes whose instances share one state in a process, by module. What is not imported has no state.
SHARED_STATES = {
    "bigmodel.training.state": "PartialState",
    "bigmodel.training.gradient_state": "GradientState",
    "bigmodel.training.accelerator_state": "AcceleratorState",
}


@dataclass(frozen=True)
class Outcome:
    """What a call came to in one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    """What the rank raised; a `RankLost` where it ended, or was stopped because it did not end."""
    trace: str = ""
    """The rank's own traceback, as text; where it was stopped, what it was doing."""


class RankLost(Exception):
    """A rank ended, or never came back."""


class RanksFailed(Exception):
    """Some ranks failed. `errors` has their exceptions by rank, and the message their tracebacks."""

    def __init__(self, outcomes: list[Outcome]):
        self.errors = {outcome.rank: outcome.error for outcome in outcomes if outcome.error is not None}
        stories = [f"Rank {outcome.rank}: {outcome.error!r}\n{outcome.trace}" for outcome in outcomes if outcome.error is not None]
        super().__init__(f"{len(self.errors)} of {len(outcomes)} ranks failed.\n" + "\n".join(stories))


class Processes:
    """`count` processes that form the default group of `torch.distributed`; they start with the first call."""

    def __init__(self, count: int):
        self.count = count
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE_SECONDS, **kwargs: Any) -> list[Any]:
        """What `function(*args, **kwargs)` returns in each rank.

        `function` is importable by name (module level); arguments and results are pickled, tensors by value. Every call finds
        `RANK`, `WORLD_SIZE` and the like in the environment, seed 0, and `PartialState` and its kin unmade.

        Raises:
            RanksFailed: where a rank raised, ended, or took longer than `timeout` seconds.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        if any(outcome.error is not None for outcome in outcomes):
            raise RanksFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE_SECONDS, **kwargs: Any) -> list[Outcome]:
        """As `run`, with what the ranks raised among the results."""
        if not self._workers:
            self._start()
        job = pickle.dumps((sys.path, pickle.dumps((function, args, kwargs))))
        outcomes = self._ask(job, timeout)
        if all(outcome.error is None for outcome in outcomes):
            # A collective that one rank alone has called would be the next test's trouble.
            settled = self._ask(pickle.dumps(None), timeout)
            if any(outcome.error is not None for outcome in settled):
                outcomes = settled
            elif not all(outcome.value for outcome in settled):
                self.close()
        if any(outcome.error is not None for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """Ends the processes; the next call starts others."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="bigmodel-processes-")
        # The server looks for what it imports where this process does; it learns the path in no other way.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            for rank in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self.count, self._folder.name, theirs), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    def _ask(self, message: bytes, timeout: float) -> list[Outcome]:
        for _, connection in self._workers:
            with contextlib.suppress(BrokenPipeError):  # it has ended: told below
                connection.send_bytes(message)
        outcomes: dict[int, Outcome] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = self._received(rank, connection)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failed = sorted(rank for rank, outcome in outcomes.items() if outcome.error is not None)
        reason = f"did not end after rank {failed[0]} had failed" if failed else f"did not end within {timeout:g} seconds"
        outcomes.update(self._stuck(sorted(waiting.values()), reason))
        return [outcomes[rank] for rank in range(self.count)]

    def _received(self, rank: int, connection: Connection) -> Outcome:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._workers[rank][0]
            process.join()
            return Outcome(rank, error=RankLost(f"The process of rank {rank} ended with exit code {process.exitcode}."))

    def _stuck(self, ranks: list[int], reason: str) -> dict[int, Outcome]:
        if not ranks:
            return {}
        for rank in ranks:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.3)  # the handler writes at once, also inside a collective
        assert self._folder is not None
        stacks = {rank: _stack_file(self._folder.name, rank).read_text() for rank in ranks}
        return {rank: Outcome(rank, error=RankLost(f"Rank {rank} {reason}."), trace=stacks[rank]) for rank in ranks}


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _serve(rank: int, count: int, folder: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        ranks = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
        os.environ.update({name: str(number) for name, number in ranks.items()})
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's own name may not resolve
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=timedelta(seconds=2 * PATIENCE_SECONDS)
        )
        environment = dict(os.environ)
        _reset(environment)
        group = dist.group.WORLD
        while True:
            try:
                message = pickle.loads(connection.recv_bytes())
            except EOFError:  # the test session is over
                os._exit(0)
            outcome = _outcome(rank, _settle, group) if message is None else _outcome(rank, _call, *message)
            _reset(environment)
            connection.send_bytes(_pickled(outcome))


def _settle(group: Any) -> bool:
    """Whether the next call finds the group that the first one found."""
    if dist.group.WORLD is not group:
        return False
    dist.barrier()
    return True


def _call(path: list[str], job: bytes) -> Any:
    sys.path[:] = path
    function, args, kwargs = pickle.loads(job)
    return function(*args, **kwargs)


def _outcome(rank: int, function: Callable[..., Any], *args: Any) -> Outcome:
    try:
        return Outcome(rank, function(*args))
    except BaseException as error:  # pytest's failures, too
        return Outcome(rank, error=error, trace=traceback.format_exc())


def _pickled(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # an exception that needs more arguments than its message is pickled, and cannot be read
        return data
    except Exception as error:
        what = repr(outcome.value) if outcome.error is None else repr(outcome.error)
        replacement = RankLost(f"Rank {outcome.rank} has {what}, which cannot be sent: {error}")
        return pickle.dumps(Outcome(outcome.rank, error=replacement, trace=outcome.trace))


def _reset(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for module, name in SHARED_STATES.items():
        if module in sys.modules:
            getattr(sys.modules[module], name)._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
