"""Memory for tensors that are about to be filled, private to the process."""

from __future__ import annotations

import torch

__all__ = ["as_memory", "empty_host_tensor", "empty_tensor"]


def empty_host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor on CPU, which any thread may fill.

    Ordinary pages on purpose. Huge pages (MADV_HUGEPAGE) halve a load where the kernel has warm ones, but in a virtual machine whose host
    takes free memory back they are the coldest pages there are: 2.4 GiB of float32 from a bfloat16 file took 3 to 6 s with them and 1.4 to
    2.8 s without, in fresh processes, measured in turns.
    """
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
