"""`reduce`: the tensors of all processes made one, by sum, mean, largest or smallest element."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TrainingError
from .agreement import Visit, meet
from .nested import recursively_apply
from .state import PartialState
from .wire import buckets, from_bytes, has_arithmetic, in_order, put, wire_device, within_frame

__all__ = ["reduce"]

OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "none": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """New tensors that hold, element by element, the mean (or another reduction) of those of all processes.

    float16, bfloat16 and float8 are summed in float32, integers in int64; every result has the dtype of its tensor, and is the same to the
    bit in every process.

    Args:
        tensor: a tensor or a structure of tensors; in every process the same structure, dtypes and shapes. Other leaves are to be equal.
        reduction: `mean`, `sum`, `max`, `min`; `none` is the sum, too.
        scale: what the result is multiplied by.

    Raises:
        TrainingError: an unknown reduction.
        DistributedOperationException: in every process, where the above differ between ranks, and for what has no such reduction: the mean
            of integers, the sum of bools, an order of complex numbers, any of dtypes of less than a byte.
    """
    state = PartialState()
    unknown = None if reduction in OPERATIONS else f"There is no reduction {reduction!r}; choose one of {', '.join(OPERATIONS)}."
    if not state.use_distributed:
        if unknown:
            raise TrainingError(unknown)
        return recursively_apply(_scaled, tensor, scale)
    visit = Visit(f"reduce(reduction={reduction!r}, scale={scale})", compares_values=True, problem=unknown)
    visit.open(tensor)
    for given in visit.tensors:
        visit.problem = visit.problem or _refusal(given.dtype, reduction) or _scale_refusal(given.dtype, scale)
    inline, mine = within_frame(visit, state)
    rows = meet(visit, mine).rows
    reduced = _in_frames(visit.tensors, rows, reduction) if inline else _in_buckets(visit.tensors, reduction, wire_device(state))
    results: dict[int, torch.Tensor] = {}
    for position, numbers in reduced:
        if reduction == "mean":
            numbers.div_(state.num_processes)
        if scale != 1.0:
            numbers.mul_(scale)
        results[position] = _like(visit.tensors[position], numbers)
    return put(tensor, [results[position] for position in range(len(results))])


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    if refusal := _scale_refusal(tensor.dtype, scale):
        raise TrainingError(f"reduce cannot be done: {refusal}.")
    return tensor.clone() if scale == 1.0 else (tensor * scale).to(tensor.dtype)


def _refusal(dtype: torch.dtype, reduction: str) -> str | None:
    continuous = dtype.is_floating_point or dtype.is_complex
    if not has_arithmetic(dtype):
        return f"torch cannot compute with {dtype}"
    if reduction == "mean" and not continuous:
        return f"the mean of {dtype} is not {dtype}: convert it to a floating-point dtype first, or take the sum"
    if reduction in ("sum", "none") and dtype == torch.bool:
        return f"{dtype} has no sum: convert it to int64 to count, or take max (any) or min (all)"
    if reduction in ("max", "min") and (dtype.is_complex or dtype == torch.uint64):
        return f"there is no {reduction} of {dtype}"
    return None


def _scale_refusal(dtype: torch.dtype, scale: float) -> str | None:
    if scale == 1.0 or dtype.is_floating_point or dtype.is_complex:
        return None
    return f"{dtype} cannot be scaled by {scale}: convert it to a floating-point dtype first"


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32 if dtype.is_floating_point or dtype.is_complex else torch.int64


def _numbers(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A copy, on `device` if it is given, as real numbers of [elements] in the dtype to compute in; a complex number is two of them."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.promote_types(tensor.dtype, torch.complex64)).resolve_conj())
    return tensor.to(
        tensor.device if device is None else device, _computed_in(tensor.dtype), copy=True, memory_format=torch.contiguous_format
    ).view(-1)


def _like(given: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The tensor of the shape, dtype and device of `given` that these numbers make."""
    if given.is_complex():
        numbers = torch.view_as_complex(numbers.view(-1, 2))
    result = numbers.to(given.device, given.dtype).view(given.shape)
    # A part of a bucket would keep all of it alive, and be saved with all of it.
    return result if result.untyped_storage().nbytes() == result.nbytes else result.clone()


def _in_frames(tensors: list[torch.Tensor], rows: torch.Tensor, reduction: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Positions and numbers; every rank computes the same from what all have sent."""
    start = 0
    for position, given in enumerate(tensors):
        sent = rows[:, start : start + given.nbytes]
        start += given.nbytes
        if not given.numel():
            yield position, _numbers(given)
            continue
        by_rank = _numbers(from_bytes(sent, given, (-1,))).view(len(rows), -1)
        yield position, by_rank.amax(0) if reduction == "max" else by_rank.amin(0) if reduction == "min" else by_rank.sum(0)


def _in_buckets(tensors: list[torch.Tensor], reduction: str, wire: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Positions and numbers, those of one dtype together."""

    def started() -> Iterator[tuple[Any, tuple[list[int], list[torch.Tensor]]]]:
        for dtype in dict.fromkeys(_computed_in(given.dtype) for given in tensors):
            positions = [position for position, given in enumerate(tensors) if _computed_in(given.dtype) == dtype]
            following = iter(positions)
            for bucket in buckets([tensors[position] for position in positions]):
                pieces = [_numbers(given, wire) for given in bucket]
                flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                work = dist.all_reduce(flat, op=OPERATIONS[reduction], async_op=True) if flat.numel() else None
                yield work, (list(islice(following, len(bucket))), list(flat.split([piece.numel() for piece in pieces])))

    for positions, numbers in in_order(started()):
        yield from zip(positions, numbers, strict=True)
