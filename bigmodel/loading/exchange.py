"""Several processes that load the same model: each part of a file is read by one of them, and sent to the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from ..errors import BigModelError, CheckpointError
from ..progress import Progress, ProgressCallback
from ..protocols import TensorSpec
from .agreement import agree_with_rank0
from .dealing import shares
from .fresh_memory import ask_for_huge_pages
from .host_memory import empty_host_tensor, empty_tensor
from .match import Match
from .reader import Reader
from .replace import Replacement
from .sharded import filled_like, is_sharded, local_box, local_device

__all__ = ["exchange", "several_processes"]

SHARE_BYTES: Final = 8 << 20
"""Sent at once. Each process holds two of them beside its model."""


def several_processes() -> bool:
    """Whether a process group of more than one process is set up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a tensor's values go in this process."""

    before: torch.Tensor
    """What the model holds under the name."""
    local: torch.Tensor
    """New memory for the part that this process holds."""
    start: tuple[int, ...]
    """First index of the part in each dimension."""


def exchange(
    model: nn.Module,
    match: Match | None,
    error: Exception | None,
    *,
    rank0_reads: bool,
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> None:
    """Fills `model` (with the same tensors in all processes; of DTensors each holds its part) in a call that all processes make.

    With `rank0_reads`, process 0 alone has a `match` and reads; otherwise each reads 1/N of the bytes. `error` is what went wrong before:
    all processes raise when one has an error, `CheckpointError` where it is another's, and `MatchError` when their models differ; no model
    has changed then. Memory: what stays, plus two shares of `SHARE_BYTES` in each process, plus the reader's ring.
    Progress counts bytes of the model that have arrived, in every process.
    """
    _agree(error)
    agreed = agree_with_rank0(model, match)
    transfers = match.transfers if match is not None else {}
    device = _link_device()
    targets = _targets(model, agreed.dtypes)
    ask_for_huge_pages(target.local for target in targets.values())
    specs = {name: TensorSpec(tuple(target.before.shape), target.local.dtype) for name, target in targets.items()}
    rounds = list(shares(specs, 1 if rank0_reads else dist.get_world_size(), SHARE_BYTES))
    longest = max((share.nbytes for round_ in rounds for share in round_), default=0)
    own = empty_host_tensor((longest if match is not None else 0,), torch.uint8)
    received = empty_tensor((longest,), torch.uint8, device)
    reader = Reader(None if match is None else match.identities)
    rank = dist.get_rank()
    total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
    failure: Exception | None = None
    try:
        with Progress(total, "Loading", show=progress, callback=progress_callback) as bar:
            for round_ in rounds:
                if rank < len(round_) and failure is None:
                    try:
                        mine = round_[rank].chunks
                        reader.read([(transfers[chunk.name].box(chunk.start, chunk.spec.shape), chunk.of(own)) for chunk in mine])
                    except Exception as problem:  # whatever it is, the others must not wait for it
                        failure = problem
                _agree(failure)
                for source, share in enumerate(round_):
                    sent = own[: share.nbytes].to(device) if source == rank else received[: share.nbytes]
                    if share.nbytes:
                        dist.broadcast(sent, src=source)
                    for chunk in share.chunks:
                        _put(targets[chunk.name], chunk.start, chunk.of(sent))
                try:
                    bar.advance(sum(chunk.nbytes for share in round_ for chunk in share.chunks))
                except Exception as problem:  # the caller's own function
                    failure = problem
            _agree(failure)
    finally:
        reader.close()
    with Replacement(model) as replacement:
        for name, target in targets.items():
            every = list(agreed.ties[name])
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
    except Exception as problem:  # memory that one process does not get
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


def _put(target: _Target, start: tuple[int, ...], values: torch.Tensor) -> None:
    """Copies what this process holds of a box of a tensor."""
    from_values: list[slice] = []
    to_local: list[slice] = []
    for first, size, own_first, own_size in zip(start, values.shape, target.start, target.local.shape, strict=True):
        low, high = max(first, own_first), min(first + size, own_first + own_size)
        if low >= high:
            return
        from_values.append(slice(low - first, high - first))
        to_local.append(slice(low - own_first, high - own_first))
    target.local[tuple(to_local)].copy_(values[tuple(from_values)])
