"""The simulated accelerator as fixtures: `accelerators` gives a test devices, `execution_device` runs it on CPU and on a device.

See tests/simulator/README.md. `processes(n)` gives a test n processes in one group.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import Processes
from torch._subclasses.fake_tensor import FakeTensor

sys.path.insert(0, str(Path(__file__).parent / "simulator"))

import simdev

# Plans are made with what a developer's machine was measured to do, where it was. Tests see none of it.
os.environ["BIGMODEL_CACHE"] = str(Path(tempfile.gettempdir()) / f"bigmodel-tests-{os.getpid()}")

# The tests run side by side, one process a core; and memory that a kernel takes for each thread does not depend on the machine then.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

AcceleratorsFactory = Callable[..., list[torch.device]]

PATIENCE_SECONDS = 20.0
"""How long a thread may take to let go of its last tensor, on a machine that has much else to do."""

_build_error: simdev.SimulatorBuildError | None = None
_failed = pytest.StashKey[bool]()


def _needs_simulator(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return "accelerators" in getattr(item, "fixturenames", ()) or str(parameters.get("execution_device", "cpu")) != "cpu"


def pytest_collection_finish(session: pytest.Session) -> None:
    # Before the first test, so that torch looks the same to all tests of a run; and only where a test needs it, since the first
    # build takes a minute. A failure is told to the tests that need the simulator: they fail, the others run.
    global _build_error
    if session.config.option.collectonly or not any(map(_needs_simulator, session.items)):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else nullcontext():  # it says so when it builds
            simdev.register()
    except simdev.SimulatorBuildError as error:
        _build_error = error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


def _simulator() -> ModuleType:
    if _build_error is not None:
        pytest.fail(str(_build_error), pytrace=False)
    return simdev.register()


@pytest.fixture(autouse=True)
def no_group_afterwards() -> Iterator[None]:
    """A process group that a test makes ends with it: which tests come after it in this process changes from run to run."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def accelerators(request: pytest.FixtureRequest) -> Iterator[AcceleratorsFactory]:
    """Makes simulated accelerators: `devices = accelerators(2, memory="64MiB", h2d_gbps=2.0)`; without the call there are none.

    Arguments: `count`; `memory`, a size for all or a list of one each; `check_leaks`; and any of `simdev.settings.DEFAULTS` (poison and
    sanitizer are on). Called again, it replaces the devices by others. After the test they are gone, and the test has failed if the
    sanitizer found accesses in no order, or if bytes are still allocated after garbage collection and `check_leaks` is true.
    """
    simulator = _simulator()
    checks_leaks = True

    def make(
        count: int = 1, *, memory: int | str | Sequence[int | str] = "256MiB", check_leaks: bool = True, **settings: Any
    ) -> list[torch.device]:
        nonlocal checks_leaks
        checks_leaks = check_leaks
        return simulator.set_up(count, memory, **settings)

    yield make

    try:
        for index in range(simulator.device_count()):
            simulator.synchronize(index)
        hazards = simulator.take_hazards()
        failed = request.node.stash.get(_failed, False)  # its traceback keeps its tensors alive
        leaks = None if failed or not checks_leaks else _leaks(simulator)
    finally:
        simulator.tear_down()
    if hazards:
        pytest.fail("The sanitizer found accesses that nothing orders:\n" + "\n".join(hazards), pytrace=False)
    if leaks is not None:
        pytest.fail(leaks, pytrace=False)


def _leaks(simulator: ModuleType) -> str | None:
    """What is still allocated, or None. Only threads can let go of tensors later: while there are any, they are given time to do so."""
    indices = range(simulator.device_count())
    deadline = time.monotonic() + PATIENCE_SECONDS
    collected = False
    while leaks := {index: count for index in indices if (count := simulator.memory_allocated(index))}:
        waiting = threading.active_count() > 1 and time.monotonic() < deadline
        if collected and not waiting:
            return f"Bytes still allocated on devices after the test, by device index: {leaks}\n{_tensors_alive(simulator)}"
        if collected:
            time.sleep(0.01)
        gc.collect()  # 0.2 s with transformers loaded, so only where something is left
        collected = True
    return None


def _tensors_alive(simulator: ModuleType) -> str:
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and not isinstance(value, FakeTensor)]
    on_device = [tensor for tensor in tensors if tensor.device.type == simdev.NAME]
    lines = [
        f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, referred to by "
        f"{sorted({type(holder).__name__ for holder in gc.get_referrers(tensor) if holder is not tensors and holder is not on_device})}"
        for tensor in on_device[:8]
    ]
    return "\n".join([f"{len(on_device)} tensors on them are alive in Python:", *lines])


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[int], Processes]]:
    """Gives `Processes` of a size: `processes(2).run(function, *args)` returns what each rank returns. All tests share them."""
    sets: dict[int, Processes] = {}

    def of_size(count: int) -> Processes:
        if count not in sets:
            sets[count] = Processes(count)
        return sets[count]

    yield of_size
    for each in sets.values():
        each.close()


@pytest.fixture(params=["cpu", "sim:0"])
def execution_device(request: pytest.FixtureRequest) -> torch.device:
    """A device to compute on: the test runs on the CPU, and again on a simulated accelerator of 256 MiB with poison and sanitizer on."""
    if request.param == "cpu":
        return torch.device("cpu")
    return request.getfixturevalue("accelerators")(1)[0]
