"""Parameters of which this process holds a part (DTensors: FSDP2, tensor parallelism): which part, and how it is read alone."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .transfer import Transfer

__all__ = ["filled_like", "is_sharded", "local_box", "local_device", "local_transfer"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # its import takes a while; who has not done it has no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def local_device(tensor: Any) -> torch.device:
    """Where this process's part of a DTensor belongs: where it is, or, if that is meta, on the device of its mesh."""
    if not tensor.is_meta:
        return torch.device(tensor.device)
    kind = tensor.device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def local_box(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First index and shape of this process's part of a DTensor. Raises `PlanError` for partial sums, which no values of a file fill."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError(f"{name!r} is a partial sum over {tensor.device_mesh}; only sharded and replicated tensors can be loaded.")
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start), tuple(shape)


def local_transfer(transfer: Transfer, tensor: Any) -> Transfer:
    """The part of a transfer that fills this process's part of a DTensor."""
    return transfer.box(*local_box(transfer.target, tensor))


def filled_like(tensor: Any, local: torch.Tensor) -> Any:
    """A parameter (or a plain DTensor, for a buffer) like `tensor` whose local part is `local`."""
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
