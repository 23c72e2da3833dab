"""One process, and what the launcher's numbers make of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes

from bigmodel.errors import TrainingError
from bigmodel.training.collectives import gather
from bigmodel.training.enums import DistributedType, PrecisionType
from bigmodel.training.environment import get_free_port
from bigmodel.training.state import PartialState, wait_for_everyone


def test_one_process_is_the_first_and_the_last() -> None:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type == DistributedType.NO == "NO"
    assert state.device == torch.device("cpu")
    assert PartialState().__dict__ is state.__dict__
    state.wait_for_everyone()
    with state.split_between_processes([1, 2, 3]) as share:
        assert share == [1, 2, 3]


def test_the_group_of_a_launched_process_ends_with_it() -> None:
    script = (
        "import atexit, torch.distributed as dist\n"
        "from bigmodel import PartialState\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        "PartialState(cpu=True)\n"
        "print(dist.is_initialized())\n"
    )
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    environment = {**os.environ, **launched, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_ranks_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="rank 3 of 2"):
        PartialState()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TrainingError, match="MASTER_ADDR"):
        PartialState()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(TrainingError, match="WORLD_SIZE is 'many'"):
        PartialState()


def test_words_are_their_values() -> None:
    assert "bf16" in PrecisionType
    assert "bf17" not in PrecisionType
    assert str(PrecisionType.BF16) == "bf16"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


LAUNCHED_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def test_a_device_without_a_word_of_its_own_trains_in_a_group(accelerators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = accelerators(1)[0]
    for name, value in {**LAUNCHED_ALONE, "MASTER_PORT": str(get_free_port()), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    state = PartialState()
    try:
        assert (state.device, state.backend, state.distributed_type) == (device, "gloo", DistributedType.MULTI_GPU)
        state.wait_for_everyone()
        gathered = gather(torch.arange(3, device=device))
        assert (gathered.device, gathered.tolist()) == (device, [0, 1, 2])
    finally:
        state.destroy_process_group()


Ranks = Callable[[int], Processes]


def facts_of_the_group() -> dict[str, Any]:
    state = PartialState()
    wait_for_everyone()
    called = []
    for name, decorate in {
        "main": state.on_main_process,
        "local main": state.on_local_main_process,
        "last": state.on_last_process,
        "first of two": lambda function: state.on_process(function, process_index=1),
        "first on its host": state.on_local_process(local_process_index=1),
    }.items():
        if decorate(lambda name=name: name)() == name:
            called.append(name)
    with state.split_between_processes({"a": list(range(4)), "b": torch.arange(4)}, apply_padding=True) as share:
        pass
    facts = [state.num_processes, state.process_index, state.local_num_processes, state.local_process_index]
    facts += [state.is_main_process, state.is_local_main_process, state.is_last_process, state.use_distributed]
    facts += [state.distributed_type.value, state.backend, str(state.device), share["a"], share["b"].tolist(), called]
    assert repr(state).startswith("Distributed environment: DistributedType.MULTI_CPU  Backend: gloo\n")
    return {"facts": facts}


@pytest.mark.xdist_group("processes")
def test_each_process_knows_its_place(processes: Ranks) -> None:
    common = [True, "MULTI_CPU", "gloo", "cpu"]
    results = [result["facts"] for result in processes(3).run(facts_of_the_group)]
    assert results == [
        [3, 0, 3, 0, True, True, False, *common, [0, 1], [0, 1], ["main", "local main"]],
        [3, 1, 3, 1, False, False, False, *common, [2, 3], [2, 3], ["first of two", "first on its host"]],
        [3, 2, 3, 2, False, False, True, *common, [3, 3], [3, 3], ["last"]],
    ]


def who_came_first(folder: str, local: bool, fails: bool) -> list[str]:
    state = PartialState()
    first = state.local_main_process_first if local else state.main_process_first
    outcome = contextlib.suppress(KeyError) if fails else contextlib.nullcontext()
    with outcome, first():
        seen = sorted(file.name for file in Path(folder).iterdir())
        if state.process_index == 0:
            time.sleep(0.2)  # the others would look meanwhile
        (Path(folder) / str(state.process_index)).touch()
        if fails and state.process_index == 0:
            raise KeyError("the first one failed")
    state.wait_for_everyone()
    return seen


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_main_process_comes_first_also_when_it_fails(local: bool, fails: bool, processes: Ranks, tmp_path: Path) -> None:
    first, second = processes(2).run(who_came_first, str(tmp_path), local, fails)
    assert first == []
    assert second == ["0"]


def print_everywhere(folder: str) -> None:
    state = PartialState()
    with (Path(folder) / str(state.process_index)).open("w") as file:
        state.print("once a host", file=file)


@pytest.mark.xdist_group("processes")
def test_the_first_process_of_a_host_prints(processes: Ranks, tmp_path: Path) -> None:
    processes(2).run(print_everywhere, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["once a host\n", ""]


def end_the_group_twice() -> tuple[bool, bool]:
    state = PartialState()
    before = dist.is_initialized()
    state.destroy_process_group()
    state.destroy_process_group()
    return before, dist.is_initialized()


@pytest.mark.xdist_group("processes")
def test_the_group_is_ended_once(processes: Ranks) -> None:
    assert processes(2).run(end_the_group_twice) == [(True, False)] * 2


def test_it_computes_on_the_accelerator_of_its_place(accelerators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = accelerators(3)
    assert PartialState().device == devices[0]
    assert PartialState().default_device == devices[0]
    with pytest.raises(TrainingError, match="already computes on sim:0"):
        PartialState(cpu=True)
    PartialState._reset_state()
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_backend", lambda: "sim")
    monkeypatch.setattr("bigmodel.training.state.collective_name", lambda device: "GPU")
    try:
        state = PartialState()
        assert (state.device, state.process_index, state.local_process_index) == (devices[2], 5, 2)
        assert torch.accelerator.current_device_index() == 2, "what is made without naming a device is made there"
        assert state.distributed_type == DistributedType.MULTI_GPU
        assert not state.is_local_main_process
    finally:
        torch.accelerator.set_device_index(0)


def test_the_cpu_is_kept_to_where_it_is_asked_for(accelerators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(1)
    assert PartialState(cpu=True).device == torch.device("cpu")
    assert PartialState(cpu=True).default_device.type == "sim"
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert PartialState().device == torch.device("cpu")


def test_debug_mode_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PartialState().debug is False
    monkeypatch.setenv("BIGMODEL_DEBUG_MODE", "1")
    assert PartialState().debug is False
    PartialState._reset_state()
    assert PartialState().debug is True
