"""Memory for tensors that are about to be filled: on the host private to the process, on an accelerator one allocation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..constants import GROUP_ALIGNMENT_BYTES
from ..protocols import TensorSpec

__all__ = ["as_memory", "empty_host_tensor", "empty_tensor", "empty_tensors"]


def empty_host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor on CPU, which any thread may fill."""
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be filled from outside of it
        return torch.empty(shape, dtype=dtype, device="cpu")


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised contiguous tensor on any device, which any thread may fill."""
    if device.type == "cpu":
        return empty_host_tensor(shape, dtype)
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous tensor on CPU, to be written to."""
    return memoryview(tensor.view(torch.uint8).numpy().data)


def empty_tensors(specs: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
    """Uninitialised contiguous tensors. On an accelerator they lie in one allocation, which goes with the last of them.

    An allocator of an accelerator rounds every large tensor up, by up to 2 MiB; together they take what was planned for them.
    """
    if device.type == "cpu":
        return [empty_host_tensor(spec.shape, spec.dtype) for spec in specs]
    sizes = [torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES)
    with torch.inference_mode(False):
        flat = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        # `.data` gives each its own version counter: writing to one must not tell autograd that all have changed.
        return [
            flat[start : start + size].view(spec.dtype).view(spec.shape).data
            for start, size, spec in zip(starts, sizes, specs, strict=False)
        ]
