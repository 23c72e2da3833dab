"""Several processes that load the same model: each part of a file is read by one of them, and sent to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ..errors import BigModelError, CheckpointError
from .fresh_memory import ask_for_huge_pages
from .host_memory import empty_tensor
from .match import Match
from .reader import Reader
from .replace import Replacement
from .sharded import filled_like, is_sharded, local_box, local_device
from .transfer import Transfer

__all__ = ["exchange", "several_processes"]

CHUNK_BYTES: Final = 8 << 20
"""Sent at once: what each process holds beside its model."""


def several_processes() -> bool:
    """Whether a process group of more than one process is set up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a tensor that one process reads; the whole of one without dimensions."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a tensor's values go in this process."""

    before: torch.Tensor
    """What the model holds under the name."""
    local: torch.Tensor
    """New memory for the part that this process holds."""
    start: tuple[int, ...]
    """First index of the part in each dimension."""


def exchange(model: nn.Module, match: Match | None, error: Exception | None, *, rank0_reads: bool) -> None:
    """Fills `model` (with the same tensors in all processes; of DTensors each holds its part) in a call that all processes make.

    With `rank0_reads`, process 0 alone has a `match` and reads; otherwise each reads 1/N of the bytes. `error` is what went wrong before:
    all processes raise when one has an error, `CheckpointError` where it is another's, and no model has changed then. Memory: what stays,
    plus a chunk of `CHUNK_BYTES` in each process, plus the reader's ring.
    """
    _agree(error)
    aliases: dict[str, str] = dict(match.aliases) if match is not None else {}
    transfers = match.transfers if match is not None else {}
    told: list[Any] = [{name: transfer.dtype for name, transfer in transfers.items()}, aliases]
    dist.broadcast_object_list(told, src=0)
    dtypes, aliases = told
    device = _link_device()
    targets = _targets(model, dtypes)
    ask_for_huge_pages(target.local for target in targets.values())
    readers = 1 if rank0_reads else dist.get_world_size()
    reader = Reader(None if match is None else match.identities)
    rank = dist.get_rank()
    try:
        for round_ in _rounds(targets, readers):
            own = None
            failure: Exception | None = None
            if rank < len(round_):
                try:
                    own = _read(reader, transfers[round_[rank].name], round_[rank])
                except Exception as problem:  # whatever it is, the others must not wait for it
                    failure = problem
            _agree(failure)
            for source, chunk in enumerate(round_):
                target = targets[chunk.name]
                shape = (chunk.rows, *target.before.shape[1:]) if target.before.dim() else ()
                sent = own if own is not None and source == rank else torch.empty(shape, dtype=target.local.dtype)
                sent = sent.to(device)
                dist.broadcast(sent.view(-1).view(torch.uint8), src=source)
                _put(target, chunk, sent)
    finally:
        reader.close()
    with Replacement(model) as replacement:
        for name, target in targets.items():
            every = [name, *(alias for alias, first in aliases.items() if first == name)]
            if not is_sharded(target.before):
                replacement.put(every, target.local)
            elif _is_renewed(target):
                replacement.put_object(every, filled_like(target.before, target.local))
    for target in targets.values():
        if is_sharded(target.before) and not _is_renewed(target):
            with torch.no_grad():
                target.before.to_local().copy_(target.local)  # type: ignore[attr-defined]  # its owner holds on to this memory


def _is_renewed(target: _Target) -> bool:
    """Whether a DTensor becomes a new one; otherwise its memory, which its owner holds on to, is written to."""
    return target.before.is_meta or target.before.dtype != target.local.dtype


def _agree(error: Exception | None) -> None:
    """Raises in all processes when one has an error."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if error is None else _words(error))
    if error is not None:
        raise error
    for rank, message in enumerate(found):
        if message is not None:
            raise CheckpointError(f"Rank {rank} could not load: {message}")


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, BigModelError) else f"{type(error).__name__}: {error}"


def _link_device() -> torch.device:
    """Where the default group's backend takes tensors from."""
    backend = dist.get_backend()
    if "gloo" in backend or "mpi" in backend or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(str(torch.accelerator.current_accelerator()), torch.accelerator.current_device_index())


def _targets(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, _Target]:
    """Memory for everything, or an error in all processes."""
    targets: dict[str, _Target] = {}
    failure: Exception | None = None
    try:
        targets = {name: _target(model, name, dtype) for name, dtype in dtypes.items()}
    except Exception as problem:  # memory that one process does not get, a model that differs from the others'
        failure = problem
    _agree(failure)
    return targets


def _target(model: nn.Module, name: str, dtype: torch.dtype) -> _Target:
    before = _registered(model, name)
    if is_sharded(before):
        start, shape = local_box(name, before)
        return _Target(before, empty_tensor(shape, dtype, local_device(before)), start)
    device = torch.device("cpu") if before.is_meta else before.device
    return _Target(before, empty_tensor(tuple(before.shape), dtype, device), (0,) * before.dim())


def _registered(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), attribute)
    return tensor


def _rounds(targets: Mapping[str, _Target], readers: int) -> Iterator[Sequence[_Chunk]]:
    """Chunks in the order of the tensors, as many at a time as there are processes that read."""
    pending: list[_Chunk] = []
    for name, target in targets.items():
        if 0 in target.before.shape:
            continue
        count = target.before.shape[0] if target.before.dim() else 1
        row_bytes = target.before.numel() // count * target.local.dtype.itemsize
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, count, step):
            pending.append(_Chunk(name, start, min(step, count - start)))
            if len(pending) == readers:
                yield pending
                pending = []
    if pending:
        yield pending


def _read(reader: Reader, transfer: Transfer, chunk: _Chunk) -> torch.Tensor:
    part = transfer.rows(chunk.start, chunk.rows) if transfer.shape else transfer
    values = torch.empty(part.shape, dtype=transfer.dtype)
    reader.read([(part, values)])
    return values


def _put(target: _Target, chunk: _Chunk, values: torch.Tensor) -> None:
    """Copies what this process holds of the chunk."""
    local = target.local
    if not local.dim():
        local.copy_(values)
        return
    low = max(chunk.start, target.start[0])
    high = min(chunk.start + chunk.rows, target.start[0] + local.shape[0])
    if low >= high or local.numel() == 0:
        return
    inner = tuple(slice(start, start + size) for start, size in zip(target.start[1:], local.shape[1:], strict=True))
    rows = local[low - target.start[0] : high - target.start[0]]
    rows.copy_(values[(slice(low - chunk.start, high - chunk.start), *inner)])
