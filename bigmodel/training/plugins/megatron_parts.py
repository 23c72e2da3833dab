"""Parameters of megatron-core that tensor-parallel processes share: parts of whole tensors, their norm, and how they are filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["clip_norm", "is_part", "laid_out", "own_part", "part_of", "whole_of"]


def is_part(parameter: torch.Tensor) -> bool:
    """Whether a parameter is split over the tensor-parallel processes; megatron-core notes it on the parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def laid_out(parameter: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A view of a value that has the shape of the parameter, and the dimension along which the parts make one whole.

    Several matrices that are split each, such as the two of a gated layer, lie in one parameter one after the other; in the view they have
    a dimension of their own, the first.
    """
    stride, dimension = int(parameter.partition_stride), int(parameter.partition_dim)  # type: ignore[attr-defined]
    if stride == 1:
        return value, dimension
    shape = list(value.shape)
    shape[dimension : dimension + 1] = [stride, shape[dimension] // stride]
    return value.view(shape), dimension + 1


def part_of(parameter: torch.Tensor, value: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A value of the parameter's shape as this process's part of a DTensor of the same memory; as it is where the parameter is whole.

    Args:
        mesh: the one-dimensional mesh of tensor-parallel processes.
    """
    if not is_part(parameter):
        return value
    from torch.distributed.tensor import DTensor, Shard

    view, dimension = laid_out(parameter, value)
    return DTensor.from_local(view, mesh, [Shard(dimension)], run_check=False)


def whole_of(parameter: torch.Tensor, value: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The values of all tensor-parallel processes, as `laid_out`; they all call it."""
    part: Any = part_of(parameter, value.detach(), mesh)
    return part.full_tensor() if is_part(parameter) else part


def own_part(parameter: torch.Tensor, whole: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This process's part of a whole that is `laid_out`, in the shape of the parameter, which may have no values (meta)."""
    if not is_part(parameter):
        return whole
    view, dimension = laid_out(parameter, parameter)
    size = view.shape[dimension]
    return whole.narrow(dimension, mesh.get_local_rank() * size, size).reshape(parameter.shape)


def clip_norm(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, mesh: Any) -> torch.Tensor:
    """Scales gradients down to a common norm of at most `max_norm`. Returns the norm before: of the whole model, each value once."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    # What is whole in every process counts in the first of them.
    counted = [parameter.grad for parameter in trained if is_part(parameter) or mesh.get_local_rank() == 0]
    total = torch.nn.utils.get_total_norm([gradient for gradient in counted if gradient is not None], norm_type).to(
        gradients[0].device if gradients else torch.device("cpu")
    )
    if mesh.size() > 1:
        if norm_type == float("inf"):
            dist.all_reduce(total, dist.ReduceOp.MAX, mesh.get_group())
        else:
            total = total**norm_type
            dist.all_reduce(total, dist.ReduceOp.SUM, mesh.get_group())
            total = total ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return total
