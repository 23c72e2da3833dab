"""Collectives on nested structures of tensors, and on Python objects, for every process of the job.

All tensors of a structure travel together: what is small within the frame that the ranks agree by (`agreement.py`), the rest in buckets of
bytes, so that the number of collectives does not grow with the number of tensors, and any dtype can travel. What is no tensor comes back
as it is. In one process the data come back unchanged.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DistributedOperationException
from .agreement import INLINE_BYTES, Visit, all_gather, meet
from .state import PartialState
from .wire import buckets, check_rank, from_bytes, has_arithmetic, in_order, is_plain, joined, put, total_bytes, wire_device, within_frame

__all__ = [
    "CannotPadNestedTensorWarning",
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "pad_across_processes",
]

MOST_BROADCASTS = 2
"""Under way at once. Data that flow one way keep gloo's one thread a process busy by themselves; with more of them it took twice as long
in every other job."""


class CannotPadNestedTensorWarning(UserWarning):
    """Nested tensors have no one size to be padded to; they are left as they are."""


def gather(tensor: Any) -> Any:
    """The tensors of all processes, in the order of ranks, joined along dimension 0; without dimensions, they are taken as rows of one.

    Args:
        tensor: a tensor of any dtype or a structure of tensors; in every process the same structure, dtypes and shapes. Other leaves
            come back as this process gave them.

    Raises:
        DistributedOperationException: in every process, where these differ between ranks (see `pad_across_processes`, `gather_object`).
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    visit = Visit("gather", advice="Bring tensors to one size with pad_across_processes, or gather anything with gather_object.")
    visit.open(tensor)
    results = []
    for bucket, rows in _rows_of_ranks(visit, state):
        start = 0
        for given in bucket:
            mine = rows[:, start : start + given.nbytes]
            start += given.nbytes
            shape = (state.num_processes * (given.shape[0] if given.ndim else 1), *given.shape[1:])
            results.append(from_bytes(mine, given, shape))
    return put(tensor, results)


def _rows_of_ranks(visit: Visit, state: PartialState) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Buckets of this rank's tensors, and what all ranks have there: uint8 of [ranks, bytes of the bucket]."""
    inline, mine = within_frame(visit, state)
    frames = meet(visit, mine)
    if inline:
        yield visit.tensors, frames.rows[:, : frames.sizes[0]]
        return
    wire = wire_device(state)

    def started() -> Iterator[tuple[Any, tuple[list[torch.Tensor], torch.Tensor]]]:
        for bucket in buckets(visit.tensors):
            flat = joined(bucket, wire)
            rows = torch.empty(state.num_processes, flat.numel(), dtype=torch.uint8, device=wire)
            yield all_gather(rows.view(-1), flat, async_op=True) if flat.numel() else None, (bucket, rows)

    yield from in_order(started())


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of rank `from_process`, in every process; this process's own tensors are overwritten where they can be.

    Args:
        tensor: a tensor of any dtype or a structure of tensors; in every process the same structure, dtypes and shapes. Other leaves
            are to be equal.
        from_process: the rank that gives.

    Raises:
        DistributedOperationException: in every process, where these differ between ranks.
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    visit = Visit(
        f"broadcast(from_process={from_process})",
        advice="broadcast_object_list sends anything, whatever the others have.",
        compares_values=True,
    )
    visit.open(tensor)
    check_rank(visit, from_process, state)
    wire = wire_device(state)
    gives = state.process_index == from_process
    inline, mine = within_frame(visit, state, gives)
    frames = meet(visit, mine)
    if inline:
        return put(tensor, visit.tensors if gives else _overwritten(visit.tensors, frames.rows[from_process]))

    begun: set[int] = set()

    def started() -> Iterator[tuple[Any, tuple[list[torch.Tensor], torch.Tensor | None]]]:
        for bucket in buckets(visit.tensors):
            only = bucket[0] if len(bucket) == 1 else None
            in_place = only is not None and is_plain(only) and only.device.type == wire.type and _can_be_overwritten(only)
            # Memory that several tensors share is not written by two collectives at once.
            memories = {given.untyped_storage().data_ptr() for given in bucket}
            in_place = in_place and begun.isdisjoint(memories)
            begun.update(memories)
            flat = joined(bucket, wire) if gives or in_place else torch.empty(total_bytes(bucket), dtype=torch.uint8, device=wire)
            work = dist.broadcast(flat, src=from_process, async_op=True) if flat.numel() else None
            yield work, (bucket, None if gives or in_place else flat)

    results: list[torch.Tensor] = []
    for bucket, sent in in_order(started(), MOST_BROADCASTS):
        results += bucket if sent is None else _overwritten(bucket, sent)
    return put(tensor, results)


def _can_be_overwritten(tensor: torch.Tensor) -> bool:
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not expanded and (torch.is_inference_mode_enabled() or not tensor.is_inference())


def _overwritten(tensors: list[torch.Tensor], sent: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with these bytes in them; new ones in the place of those that cannot be overwritten."""
    results = []
    start = 0
    for tensor in tensors:
        mine = sent[start : start + tensor.nbytes]
        start += tensor.nbytes
        if not _can_be_overwritten(tensor):
            results.append(from_bytes(mine, tensor))
            continue
        with torch.no_grad():
            if tensor.dtype.itemsize == 1:  # as bytes: some of these dtypes cannot be copied
                tensor.detach().view(torch.uint8).copy_(mine.view(tensor.shape))
            else:
                tensor.copy_(from_bytes(mine, tensor))
        results.append(tensor)
    return results


def gather_object(object: Any) -> Any:
    """What the processes gave, in one list in the order of ranks: the items of lists and tuples, and anything else as one item.

    Args:
        object: anything that can be pickled; usually a list. In one process it comes back as it is.

    Raises:
        DistributedOperationException: in every process, where an object cannot be pickled, or another collective is called.
    """
    state = PartialState()
    if not state.use_distributed:
        return object
    visit = Visit("gather_object")
    mine = _pickled(visit, object)
    frames = meet(visit, mine)
    rows = frames.rows
    if max(frames.sizes) > INLINE_BYTES:
        wire = wire_device(state)
        padded = torch.zeros(max(frames.sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = torch.empty(state.num_processes, padded.numel(), dtype=torch.uint8, device=wire)
        all_gather(rows.view(-1), padded.to(wire))
        rows = rows.cpu()
    given = [pickle.loads(rows[rank, :size].numpy().tobytes()) for rank, size in enumerate(frames.sizes)]
    return [item for each in given for item in (each if isinstance(each, (list, tuple)) else [each])]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """`object_list`, its items replaced by those of rank `from_process`.

    Args:
        object_list: of the same length in every process; changed in place.
        from_process: the rank that gives.

    Raises:
        DistributedOperationException: in every process, where lengths differ, or an object cannot be pickled.
    """
    state = PartialState()
    if not state.use_distributed:
        return object_list
    visit = Visit(f"broadcast_object_list(from_process={from_process})")
    visit.open([None] * len(object_list))
    check_rank(visit, from_process, state)
    gives = state.process_index == from_process
    mine = _pickled(visit, list(object_list)) if gives else None
    frames = meet(visit, mine)
    size = frames.sizes[from_process]
    sent = frames.rows[from_process, :size]
    if size > INLINE_BYTES:
        wire = wire_device(state)
        sent = torch.empty(size, dtype=torch.uint8, device=wire) if mine is None else mine.to(wire)
        dist.broadcast(sent, src=from_process)
    if not gives:
        object_list[:] = pickle.loads(sent.cpu().numpy().tobytes())
    return object_list


def _pickled(visit: Visit, object: Any) -> torch.Tensor:
    try:
        return torch.frombuffer(bytearray(pickle.dumps(object)), dtype=torch.uint8)
    except Exception as error:  # whatever an object's own code raises
        visit.problem = f"{type(object).__name__} cannot be pickled: {error}"
        return torch.empty(0, dtype=torch.uint8)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that one process has, on the device of every process; the others give None.

    Raises:
        DistributedOperationException: in every process, where none or several have one.
    """
    state = PartialState()
    made = gather_object([None if tensor is None else (tensor.shape, tensor.dtype)])
    owners = [rank for rank, what in enumerate(made) if what is not None]
    if len(owners) != 1:
        raise DistributedOperationException(f"One process gives the tensor and the others None, but there is one in ranks {owners}.")
    shape, dtype = made[owners[0]]
    mine = torch.empty(shape, dtype=dtype, device=state.device) if tensor is None else tensor.detach().to(state.device)
    return broadcast(mine, from_process=owners[0])


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """The tensors as long along `dim` as the longest among the processes, so that they can be gathered.

    Args:
        tensor: a tensor or a structure of tensors; in every process the same structure, and as many dimensions. Tensors that have no
            dimension `dim`, and what is no tensor, are left as they are.
        dim: may count from the end.
        pad_index: the value to pad with.
        pad_first: pad before the first element instead of after the last.

    Raises:
        DistributedOperationException: in every process, where the structures differ.

    Warns:
        CannotPadNestedTensorWarning: for nested tensors, which are left as they are.
    """
    state = PartialState()
    visit = Visit(f"pad_across_processes(dim={dim})", of_tensor=lambda given: ("tensor with", given.ndim, "dimensions"))
    visit.open(tensor)
    if any(given.is_nested for given in visit.tensors):
        warnings.warn("Nested tensors cannot be padded; they are left as they are.", CannotPadNestedTensorWarning, stacklevel=2)
    if not state.use_distributed:
        return tensor
    padded = [not given.is_nested and -given.ndim <= dim < given.ndim for given in visit.tensors]
    sizes = torch.tensor([given.shape[dim] if pads else 0 for given, pads in zip(visit.tensors, padded, strict=True)], dtype=torch.int64)
    mine = sizes.view(torch.uint8)
    frames = meet(visit, mine)
    rows = frames.rows[:, : mine.numel()]
    if mine.numel() > INLINE_BYTES:
        wire = wire_device(state)
        rows = torch.empty(state.num_processes, mine.numel(), dtype=torch.uint8, device=wire)
        all_gather(rows.view(-1), mine.to(wire))
    longest = rows.cpu().contiguous().view(torch.int64).amax(0).tolist()
    return put(
        tensor,
        [
            _padded(given, dim, size, pad_index, pad_first) if pads else given
            for given, pads, size in zip(visit.tensors, padded, longest, strict=True)
        ],
    )


def _padded(tensor: torch.Tensor, dim: int, size: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    length = tensor.shape[dim]
    if length == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    start = size - length if pad_first else 0
    if not has_arithmetic(tensor.dtype):
        filled = torch.full(shape, int(pad_index), dtype=torch.uint8, device=tensor.device)
        filled.narrow(dim, start, length).copy_(tensor.detach().view(torch.uint8))
        return filled.view(tensor.dtype)
    filled = tensor.new_full(shape, pad_index)
    filled.narrow(dim, start, length).copy_(tensor)
    return filled
