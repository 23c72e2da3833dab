"""Tensors as the bytes that travel between processes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from .agreement import INLINE_BYTES, Visit
from .nested import recursively_apply
from .state import PartialState

__all__ = [
    "as_bytes",
    "buckets",
    "check_rank",
    "from_bytes",
    "has_arithmetic",
    "in_order",
    "is_plain",
    "joined",
    "put",
    "total_bytes",
    "wire_device",
    "within_frame",
]

BUCKET_BYTES = 512 << 10
"""Tensors are copied together up to this; larger ones travel alone, without a copy: that copy takes longer than another collective."""

MOST_UNDER_WAY = 8
"""Collectives that are started before the first of them is waited for: one after another, the processes wait for each other's threads
between any two. More of them would be no faster, and hold the memory of what travels in another dtype."""

T = TypeVar("T")

_BITS_ONLY = re.compile(r"torch\.(u?int[1-7]|float4_\w+|bits\w+)")


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether torch can compute with it, or even copy it: not with integers of less than a byte, and the like."""
    return _BITS_ONLY.fullmatch(str(dtype)) is None


def wire_device(state: PartialState) -> torch.device:
    """Where tensors have to be to travel: gloo takes them from the CPU, other backends from the device."""
    return torch.device("cpu") if state.backend == "gloo" else state.device


def within_frame(visit: Visit, state: PartialState, gives: bool = True) -> tuple[bool, torch.Tensor | None]:
    """Whether the visit's tensors travel within the frame of the agreement, and their bytes, where this rank `gives` its own there.

    The first tensor that has no bytes to send, or has them in the wrong place, is noted as the visit's problem.
    """
    wire = wire_device(state)
    try:
        for position, tensor in enumerate(visit.tensors):
            reason = _reason(tensor, wire)
            if reason is not None:
                visit.problem = visit.problem or f"tensor {position} ({tensor.dtype}) {reason}"
        if visit.problem is not None or wire.type != "cpu" or total_bytes(visit.tensors) > INLINE_BYTES:
            return False, None
        return True, joined(visit.tensors, wire) if gives else None
    except Exception as error:  # a tensor's class may raise anything; the other ranks must not wait for this one
        visit.problem = f"a tensor cannot be sent: {type(error).__name__}: {error}"
        return False, None


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.nbytes for tensor in tensors)


def _reason(tensor: torch.Tensor, wire: torch.device) -> str | None:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return "is not dense: convert it first (`to_dense()`, `dequantize()`, `to_padded_tensor()`)"
    if hasattr(tensor, "full_tensor"):
        return "is distributed already: give its `full_tensor()`"
    if tensor.device.type == "meta":
        return "is on meta and has no data"
    if wire.type not in ("cpu", tensor.device.type):
        return f"is on {tensor.device}, and this process computes on {wire}: move it there"
    return None


def check_rank(visit: Visit, rank: int, state: PartialState) -> None:
    """Notes as the visit's problem a rank that there is not."""
    if not 0 <= rank < state.num_processes:
        visit.problem = f"there is no process {rank}, only 0 to {state.num_processes - 1}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its elements in order, none of them conjugated or negated on the way out."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order, as uint8 of [bytes]; its own memory, where it `is_plain`."""
    tensor = tensor.detach()
    if is_plain(tensor):
        return tensor.view(-1).view(torch.uint8)
    if tensor.dtype.itemsize == 1:  # before they are made contiguous: some of these dtypes cannot be copied
        tensor = tensor.view(torch.uint8)
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of several tensors, one after another, on `device`; of one tensor its own, if they are there and plain."""
    pieces = [as_bytes(tensor).to(device) for tensor in tensors]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def from_bytes(sent: torch.Tensor, like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The tensor of the dtype and device of `like` (and its shape, if none is given) that these bytes make.

    What is a part of other memory is copied: it begins where a wider dtype cannot, and would keep all of that memory alive.
    """
    if sent.untyped_storage().nbytes() != sent.numel():
        sent = sent.clone(memory_format=torch.contiguous_format)
    return sent.view(-1).view(like.dtype).view(like.shape if shape is None else tuple(shape)).to(like.device)


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors, in order, in groups that travel together."""
    bucket: list[torch.Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if bucket and size_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(tensor)
        size_bytes += tensor.nbytes
    if bucket:
        yield bucket


def in_order(started: Iterable[tuple[Any, T]], most: int = MOST_UNDER_WAY) -> Iterator[T]:
    """What goes with each of these collectives, once it is done, in the order in which they are started.

    Args:
        started: gives, as it starts a collective, the work that it is (None: there was nothing to send) and whatever comes of it.
        most: collectives to be under way at once.
    """
    under_way: deque[tuple[Any, T]] = deque()
    for each in started:
        under_way.append(each)
        if len(under_way) == most:
            yield _awaited(*under_way.popleft())
    while under_way:
        yield _awaited(*under_way.popleft())


def _awaited(work: Any, result: T) -> T:
    if work is not None:
        work.wait()
    return result


def put(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The structure with `tensors` in the place of its own, in order."""
    following = iter(tensors)
    return recursively_apply(lambda _: next(following), data)
