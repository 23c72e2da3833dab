"""How fast bytes go from memory to memory: in RAM, to and from accelerators, between them."""

from __future__ import annotations

from typing import Final

import torch

from ..constants import MiB
from ..devices import available_host_bytes, device_memory, has_streams
from ..machine import Rate
from .timing import median_seconds

__all__ = ["measure_between", "measure_link", "measure_ram"]

COPY_BYTES: Final = 64 * MiB
SMALL_BYTES: Final = 4096
"""A copy that takes no time beside its latency."""

CPU = torch.device("cpu")


def measure_ram() -> Rate:
    """Bytes per second of one copy of torch in RAM."""
    nbytes = min(2 * COPY_BYTES, available_host_bytes() // 8)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return Rate(nbytes / median_seconds(lambda: target.copy_(source), CPU), "measured")


def measure_link(device: torch.device) -> tuple[Rate, Rate, Rate]:
    """Bytes per second to an accelerator from page-locked memory and from other memory, and from it to page-locked memory.

    Where the device's backend cannot lock pages, all memory of the host is of the other kind.
    """
    nbytes = _copied_bytes(device)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    pinned = pageable.pin_memory() if has_streams(device) else pageable
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return _rate(there, pinned, device), _rate(there, pageable, device), _rate(pinned, there, device)


def measure_between(first: torch.device, second: torch.device) -> Rate:
    """Bytes per second from one accelerator to another."""
    nbytes = min(_copied_bytes(first), _copied_bytes(second))
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for device in (first, second))
    return _rate(target, source, second)


def _copied_bytes(device: torch.device) -> int:
    return max(SMALL_BYTES, min(COPY_BYTES, device_memory(device)[0] // 4, available_host_bytes() // 8))


def _rate(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> Rate:
    small_target, small_source = target[:SMALL_BYTES], source[:SMALL_BYTES]
    # Whatever else the machine does only ever adds to a latency.
    latency = min(median_seconds(lambda: small_target.copy_(small_source, non_blocking=True), device) for _ in range(3))
    seconds = median_seconds(lambda: target.copy_(source, non_blocking=True), device)
    return Rate(target.numel() / max(seconds / 4, seconds - latency), "measured", latency)
