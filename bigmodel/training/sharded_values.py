"""Values of parameters that are sharded over processes (DTensors): the whole of one, and this process's part of a whole."""

from __future__ import annotations

from typing import Any

import torch

from ..loading.sharded import filled_like, is_sharded, local_box

__all__ = ["held_as", "whole"]


def whole(tensor: Any) -> torch.Tensor:
    """All values of a tensor, on the device of its mesh; of a sharded one in a call that all processes make, together."""
    if not is_sharded(tensor):
        return tensor.detach()
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    device = tensor.device_mesh.device_type
    if tensor.device.type != device:  # offloaded; its mesh's backend sends what is on its device
        local = tensor.to_local().to(device)
        tensor = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor()


def held_as(parameter: Any, value: Any) -> Any:
    """This process's part of `value` where it is a tensor like `parameter`, which is sharded; else `value` itself."""
    if not (isinstance(value, torch.Tensor) and is_sharded(parameter)) or is_sharded(value) or value.shape != parameter.shape:
        return value
    start, shape = local_box("", parameter)
    part = value[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
    return filled_like(parameter.detach(), part.to(parameter.device))
