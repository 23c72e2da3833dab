"""Which cores a process runs on: those of the NUMA node that its accelerator hangs on, or its share of the nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ..devices import accelerators, pci_address
from ..errors import TrainingError
from ..settings import environment_flag
from .environment import LOCAL_WORLD_VARIABLES, get_int_from_env

__all__ = ["override_numa_affinity", "set_numa_affinity"]

SYSTEM = Path("/sys")
"""Where Linux tells its topology: https://docs.kernel.org/admin-guide/abi-stable.html and abi-testing.html."""
THREADS = Path("/proc/self/task")


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """`override_numa_affinity`, once: later calls with the same arguments do nothing."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Makes this process, with all its threads, run on the cores near its accelerator; from there its memory is near as well.

    Where the system does not say which node an accelerator hangs on, and on the CPU, the processes of this host share the nodes evenly.
    With one node there is nothing to choose.

    Args:
        local_process_index: of this process on this host.
        verbose: print the cores; None: where `BIGMODEL_DEBUG_MODE` says so.

    Raises:
        TrainingError: the system binds no processes to cores, or offers none of these to this process.
    """
    cores = _cores(local_process_index)
    if not hasattr(os, "sched_setaffinity"):
        raise TrainingError("This system does not bind processes to cores; leave set_numa_affinity out.")
    try:
        os.sched_setaffinity(0, cores)
        for thread in THREADS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)
    except OSError as error:
        raise TrainingError(f"Process {local_process_index} cannot run on cores {_cores_text(cores)}: {error}.") from error
    if environment_flag("DEBUG_MODE") if verbose is None else verbose:
        allowed = os.sched_getaffinity(0)
        print(f"Process {local_process_index} runs on {len(allowed)} cores: {_cores_text(allowed)}")


def _cores(local_process_index: int) -> set[int]:
    nodes = _nodes()
    there = accelerators()
    if there:
        address = pci_address(there[local_process_index % len(there)])
        node = -1 if address is None else _number(SYSTEM / "bus/pci/devices" / address / "numa_node")
        if node in nodes:
            return nodes[node]
    processes = max(get_int_from_env(LOCAL_WORLD_VARIABLES, 1), local_process_index + 1)
    order = sorted(nodes)
    first = local_process_index * len(order) // processes
    after = max((local_process_index + 1) * len(order) // processes, first + 1)
    return set().union(*(nodes[node] for node in order[first:after]))


def _nodes() -> dict[int, set[int]]:
    """Cores by node; nodes of memory alone left out."""
    folders = SYSTEM.glob("devices/system/node/node[0-9]*")
    cores = {int(folder.name.removeprefix("node")): _listed((folder / "cpulist").read_text()) for folder in folders}
    found = {node: of_node for node, of_node in cores.items() if of_node}
    if not found:
        raise TrainingError(f"{SYSTEM}/devices/system/node names no cores: this system does not tell its NUMA nodes.")
    return found


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except OSError:  # a virtual machine without the device's place
        return -1


def _listed(text: str) -> set[int]:
    """`"0-2,8"` is {0, 1, 2, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _cores_text(cores: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][-1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
