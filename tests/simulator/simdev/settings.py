"""What a simulated machine looks like: how many devices, their memory, their links, and what is watched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["DEFAULTS", "MAX_DEVICES", "apply", "parse_bytes"]

MAX_DEVICES = 8

DEFAULTS: dict[str, Any] = {
    "align": 512,  # bytes; every allocation is charged in units of this
    "queued_copies": True,  # non_blocking copies from and to pinned memory run behind
    "queued_kernels": False,  # kernels whose outputs exist are queued as well
    "poison": True,  # new device memory holds 0xFF: NaN, -1
    "sanitize": True,  # accesses that no stream, event or synchronization orders raise
    "copy_delay_ms": 0.0,  # milliseconds before every queued copy
    "h2d_gbps": 0.0,  # 10^9 bytes a second; 0: as fast as memcpy
    "d2h_gbps": 0.0,
    "d2d_gbps": 0.0,
    "h2d_latency_us": 0.0,  # microseconds added to every copy
    "d2h_latency_us": 0.0,
    "d2d_latency_us": 0.0,
}

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(size: int | str) -> int:
    """Bytes of `"64MiB"`, `"1.5GB"` or a plain number."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", size)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{size!r} is not a size: write a number of bytes, or for example '64MiB'.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def apply(extension: ModuleType, count: int, memory: int | str | Sequence[int | str], **settings: Any) -> None:
    """Gives the process `count` devices with these capacities (one for all, or one each); what is not named has its default."""
    unknown = settings.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"Unknown settings of the simulated accelerator: {sorted(unknown)}. There are {sorted(DEFAULTS)}.")
    if not 0 <= count <= MAX_DEVICES:
        raise ValueError(f"{count} simulated devices asked for; 0 to {MAX_DEVICES} are possible.")
    capacities = [parse_bytes(size) for size in ([memory] * count if isinstance(memory, (int, str)) else memory)]
    if len(capacities) != count:
        raise ValueError(f"{count} simulated devices, but {len(capacities)} capacities: {capacities}.")
    extension.configure({**DEFAULTS, **settings, "devices": count})
    for index, capacity in enumerate(capacities):
        extension.set_capacity(index, capacity)
