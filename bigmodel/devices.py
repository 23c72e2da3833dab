"""The machine's devices: accelerators through `torch.accelerator`, host memory, streams. The only file that may name a vendor."""

from __future__ import annotations

import contextlib
import gc
import mmap
import numbers
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil
import torch

from .cgroups import headroom_bytes
from .errors import PlanError

__all__ = [
    "CPU_RESIDENT",
    "DeviceKey",
    "accelerator_count",
    "accelerator_started",
    "accelerator_type",
    "accelerators",
    "as_device",
    "as_key",
    "available_host_bytes",
    "clear_device_cache",
    "collective_name",
    "computes_bf16",
    "computing_key",
    "current_device",
    "device_memory",
    "device_name",
    "has_streams",
    "host_cores",
    "machine_text",
    "on_stream",
    "pci_address",
    "private_bytes",
    "random_state",
    "reading_threads",
    "set_random_state",
    "synchronize",
    "unallocated_bytes",
    "use_deterministic_algorithms",
    "visibility_variable",
]

DeviceKey: TypeAlias = int | str
"""What stands in a device map: an accelerator's index, or `"cpu"`, `"cpu:resident"`, `"mps"`, `"disk"`."""

CPU_RESIDENT: Final = "cpu:resident"
"""In a device map: rests in RAM and runs there. Beside an accelerator, `"cpu"` alone means that the weights travel there to run."""

COLLECTIVE_NAMES: Final = frozenset({"cpu", "npu", "mlu", "sdaa", "musa", "xpu", "hpu", "neuron"})
"""Types of devices after which the ecosystem names a way to train in several processes."""


def accelerator_type() -> str | None:
    """The type of this machine's accelerators (`"cuda"`, `"xpu"`, `"npu"`, …), or None where there is none."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def accelerator_count() -> int:
    """How many accelerators this machine has, told without starting their driver where torch can: this process may be forked still."""
    return 0 if torch.accelerator.current_accelerator() is None else torch.accelerator.device_count()


def accelerator_started() -> bool:
    """Whether this process has used its accelerator: a process forked from it cannot."""
    device = torch.accelerator.current_accelerator()
    started = None if device is None else getattr(_module(device), "is_initialized", None)
    return started is not None and bool(started()) and accelerator_count() > 0


def visibility_variable() -> str | None:
    """The environment variable by which the accelerators' driver is told which of them to show; None where there is none."""
    return {
        "cuda": "CUDA_VISIBLE_DEVICES",
        "xpu": "ZE_AFFINITY_MASK",
        "npu": "ASCEND_RT_VISIBLE_DEVICES",
        "mlu": "MLU_VISIBLE_DEVICES",
        "musa": "MUSA_VISIBLE_DEVICES",
        "sdaa": "SDAA_VISIBLE_DEVICES",
        "hpu": "HABANA_VISIBLE_MODULES",
        "neuron": "NEURON_RT_VISIBLE_CORES",
    }.get(accelerator_type() or "")


def accelerators() -> list[torch.device]:
    """This machine's accelerators, in index order."""
    kind = accelerator_type()
    if kind is None:
        return []
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def as_key(device: object, *, where: str = "") -> DeviceKey:
    """The device as a device map writes it: `torch.device("cuda:1")`, `"cuda:1"`, `"1"` and `1` are all 1.

    `"cpu"`, `"cpu:resident"`, `"mps"`, `"disk"` stay. Only the type of this machine's accelerator becomes an index. Raises `PlanError` for
    anything that is no device, naming `where`.
    """
    place = f" ({where})" if where else ""
    if isinstance(device, bool):
        raise PlanError(f"{device!r} is not a device{place}. Use an accelerator's index, 'cpu' or 'disk'.")
    if isinstance(device, numbers.Integral):  # numpy's integers too
        if device < 0:
            raise PlanError(f"Device index {device} is negative{place}.")
        return int(device)
    if isinstance(device, str):
        if device in ("disk", CPU_RESIDENT):
            return device
        if device.isdigit():
            return int(device)
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise PlanError(
                f"{device!r} is not a device{place}. Use an accelerator's index, a torch device such as 'cpu', or 'disk'."
            ) from error
    if isinstance(device, torch.device):
        if device.type in ("cpu", "meta", "mps"):
            return device.type
        if device.type == accelerator_type():
            return device.index if device.index is not None else torch.accelerator.current_device_index()
        return str(device)
    raise PlanError(f"{device!r} is not a device{place}. Use an accelerator's index, a torch device such as 'cpu', or 'disk'.")


def as_device(device: object) -> torch.device:
    """The torch device behind an entry of a device map; an index means this machine's accelerator.

    Raises `PlanError` for `"disk"` (no arithmetic happens there), and for an index or a type (`"cuda"`, `"xpu:3"`) that this machine lacks,
    naming what it has.
    """
    key = as_key(device)
    if key == "disk":
        raise PlanError("'disk' holds weights but cannot run a module: name an accelerator or 'cpu' as the execution device.")
    kind = accelerator_type()
    key = computing_key(key)
    if key in ("cpu", "meta") or (key == "mps" and kind == "mps"):
        return torch.device(str(key))
    if isinstance(key, str) or kind is None or key >= torch.accelerator.device_count():
        raise PlanError(f"Device {device!r} asked for, but {machine_text()}.")
    return torch.device(kind, key)


def computing_key(key: DeviceKey) -> DeviceKey:
    """The device that an entry of a device map means, whether its weights stay there or not."""
    return "cpu" if key == CPU_RESIDENT else key


def machine_text() -> str:
    """What this machine computes on, for messages: `"there are 2 accelerators of type 'cuda' (0 to 1), and 'cpu'"`."""
    kind = accelerator_type()
    if kind is None:
        return "torch sees no accelerator on this machine, only 'cpu'"
    count = torch.accelerator.device_count()
    if count == 1:
        return f"there is 1 accelerator of type {kind!r} (0), and 'cpu'"
    return f"there are {count} accelerators of type {kind!r} (0 to {count - 1}), and 'cpu'"


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of an accelerator, or of the host (which respects the container's limit)."""
    if device.type == "cpu":
        return available_host_bytes(), psutil.virtual_memory().total
    module = _module(device)
    if device.type == "mps":  # one pool shared with the host; torch reports the driver's recommendation
        total = int(module.recommended_max_memory())
        return total - int(module.driver_allocated_memory()), total
    free, total = module.mem_get_info(device)
    return int(free), int(total)


def unallocated_bytes(device: torch.device) -> int:
    """Bytes that new tensors can have: what is free, and what torch keeps of an accelerator's memory without using it.

    `sys.maxsize` for `meta`, whose tensors take none.
    """
    if device.type == "meta":
        return sys.maxsize
    free = device_memory(device)[0]
    module = None if device.type == "cpu" else _module(device)
    if module is not None and hasattr(module, "memory_reserved") and hasattr(module, "memory_allocated"):
        free += max(int(module.memory_reserved(device)) - int(module.memory_allocated(device)), 0)
    return free


def device_name(device: torch.device) -> str:
    """What the vendor calls an accelerator (`"NVIDIA H200"`), or its torch name where nobody says; the processor's name for the CPU."""
    if device.type == "cpu":
        return _processor_name()
    name = getattr(_module(device), "get_device_name", None)
    return str(device) if name is None else str(name(device))


def pci_address(device: torch.device) -> str | None:
    """Where an accelerator sits, as the system writes it (`"0000:3b:00.0"`); None where torch does not know, and for the CPU."""
    read = None if device.type == "cpu" else getattr(_module(device), "get_device_properties", None)
    if read is None:
        return None
    properties = read(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def collective_name(device: torch.device) -> str:
    """What the ecosystem calls processes that each drive such a device: `MULTI_` and this; GPU, where it has no word of their own."""
    return device.type.upper() if device.type in COLLECTIVE_NAMES else "GPU"


def computes_bf16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16; the CPU does, in software where need be."""
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    supported = None if device.type == "cpu" else getattr(_module(device), "is_bf16_supported", None)
    return supported is None or bool(supported())


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_cores() -> int:
    """Cores of the host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reading_threads() -> int:
    """Threads that read files at once: one a core, but no fewer than two (one reads while the other casts), at most eight."""
    return min(8, max(2, host_cores()))


def available_host_bytes() -> int:
    """Bytes of RAM that new allocations can have: what the system reports as available, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    headroom = headroom_bytes()
    return available if headroom is None else min(available, headroom)


def private_bytes() -> int:
    """Bytes of RAM that belong to this process alone (pages of mapped files that others could share are not counted)."""
    try:
        # Two counters of the kernel. smaps_rollup would walk the page tables, and hold up whoever asks for pages meanwhile.
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return (resident - shared) * mmap.PAGESIZE
    except OSError:
        pass
    memory = psutil.Process(os.getpid()).memory_full_info()
    return int(getattr(memory, "uss", memory.rss))


def synchronize(device: torch.device) -> None:
    """Waits for all work queued on an accelerator; nothing on CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator: uint8, one dimension, on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = _module(device)
    state: torch.Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Makes the device's default generator go on from there."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    elif device.type == "mps":
        _module(device).set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


def use_deterministic_algorithms() -> None:
    """Equal inputs give equal results on one machine, where torch has such an algorithm; an operation without one raises."""
    # Without a fixed workspace cuBLAS sums in an order that depends on the stream, and torch refuses to call it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives unused cached memory of the accelerators back to the driver; with `garbage_collection` Python's garbage goes first."""
    if garbage_collection:
        gc.collect()
    kind = accelerator_type()
    if kind is not None:
        empty = getattr(_module(torch.device(kind)), "empty_cache", None)
        if empty is not None:
            empty()


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Makes an accelerator the current one; nothing for CPU."""
    if device.type in ("cpu", "meta", "mps"):
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index or 0)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def has_streams(device: torch.device) -> bool:
    """Whether work on the device can be queued on several streams and ordered by events."""
    return device.type not in ("cpu", "meta", "mps")


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Makes `stream`, and its device, the current ones of this thread."""
    device_before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(stream.device.index or 0)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device_before)
