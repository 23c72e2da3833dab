"""Cores near the accelerator, read from a system's topology as Linux writes it."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.devices import pci_address
from bigmodel.errors import TrainingError
from bigmodel.training import numa
from bigmodel.training.numa import override_numa_affinity, set_numa_affinity
from bigmodel.training.state import PartialState


class Binding:
    """What a process is bound to, by thread id; 0 is the process."""

    def __init__(self) -> None:
        self.cores: dict[int, set[int]] = {}
        self.calls = 0

    def set(self, thread: int, cores: set[int]) -> None:
        self.calls += thread == 0
        self.cores[thread] = set(cores)

    def get(self, thread: int) -> set[int]:
        return self.cores[thread]


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Binding]:
    binding = Binding()
    monkeypatch.setattr(os, "sched_setaffinity", binding.set)
    monkeypatch.setattr(os, "sched_getaffinity", binding.get)
    set_numa_affinity.cache_clear()
    yield binding
    set_numa_affinity.cache_clear()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four cores with their hyperthreads, a node of memory alone, and three devices."""
    for node, cores in (("node0", "0-3,8-11"), ("node1", "4-7,12-15"), ("node2", "")):
        folder = tmp_path / "devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for address, node in (("0000:3b:00.0", "1"), ("0000:af:00.0", "0"), ("0001:0a:1f.0", "-1")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    return tmp_path


NODE_0, NODE_1 = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}


def test_a_process_runs_near_its_accelerator(
    accelerators: Any, binding: Binding, system: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = accelerators(4)
    places = [(0, 0x3B, 0), (0, 0xAF, 0), (1, 0x0A, 0x1F), (9, 9, 9)]

    def properties(device: torch.device) -> types.SimpleNamespace:
        domain, bus, number = places[device.index]
        return types.SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=number)

    monkeypatch.setattr(torch.get_device_module(devices[0]), "get_device_properties", properties, raising=False)
    assert [pci_address(device) for device in devices] == ["0000:3b:00.0", "0000:af:00.0", "0001:0a:1f.0", "0009:09:09.0"]
    override_numa_affinity(0)
    assert binding.cores[0] == NODE_1
    assert binding.cores[os.getpid()] == NODE_1, "every thread"
    override_numa_affinity(1, verbose=True)
    assert binding.cores[0] == NODE_0
    assert capsys.readouterr().out == "Process 1 runs on 8 cores: 0-3,8-11\n"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for index in (2, 3):  # where the system does not know, the share of the nodes
        override_numa_affinity(index)
        assert binding.cores[0] == NODE_1


@pytest.mark.parametrize(("processes", "expected"), [
    (1, [NODE_0 | NODE_1]),
    (2, [NODE_0, NODE_1]),
    (3, [NODE_0, NODE_0, NODE_1]),
    (4, [NODE_0, NODE_0, NODE_1, NODE_1]),
])  # fmt: skip
def test_processes_on_the_cpu_share_the_nodes(
    processes: int, expected: list[set[int]], binding: Binding, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for index, cores in enumerate(expected):
        override_numa_affinity(index)
        assert binding.cores[0] == cores


def test_it_is_set_once_and_overridden_every_time(binding: Binding, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_numa_affinity(0)
    set_numa_affinity(0)
    assert binding.calls == 1
    override_numa_affinity(0)
    override_numa_affinity(0)
    assert binding.calls == 3


def test_processes_bind_themselves_where_the_launcher_says_so(binding: Binding, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState()
    assert binding.calls == 0
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    PartialState()
    assert binding.cores[0] == NODE_0 | NODE_1


def test_debug_mode_prints(binding: Binding, system: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    override_numa_affinity(0)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    override_numa_affinity(0)
    assert capsys.readouterr().out == "Process 0 runs on 16 cores: 0-15\n"
    override_numa_affinity(0, verbose=False)
    assert capsys.readouterr().out == ""


def test_what_the_system_cannot_do_is_said(binding: Binding, system: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(thread: int, cores: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(TrainingError, match=r"Process 0 cannot run on cores 0-15: .*Invalid argument"):
        override_numa_affinity(0)
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(TrainingError, match="does not bind processes to cores"):
        override_numa_affinity(0)
    monkeypatch.setattr(numa, "SYSTEM", tmp_path / "nowhere")
    with pytest.raises(TrainingError, match="does not tell its NUMA nodes"):
        override_numa_affinity(0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binds no processes")
def test_on_this_machine_a_process_alone_keeps_its_cores() -> None:
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("the system does not tell its NUMA nodes")
    before = os.sched_getaffinity(0)
    override_numa_affinity(0)
    try:
        assert os.sched_getaffinity(0) >= before
    finally:
        os.sched_setaffinity(0, before)
