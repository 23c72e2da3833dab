"""Results of all processes for a metric: every sample once, also where the last batch was filled up with repeated ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..structures import children, is_dataclass_instance, is_namedtuple, rebuilt
from .collectives import gather, gather_object

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["gather_for_metrics"]


def gather_for_metrics(accelerator: Accelerator, input_data: Any, use_gather_object: bool) -> Any:
    """`input_data` of all processes in the order of the data, without the samples that a loader repeated to fill its last batch.

    Tensors are joined along their first dimension, which counts samples; those without dimensions become one of `num_processes` values.
    Lists and tuples without tensors in them are lists of samples, whatever these are, and are joined to one list. Any other single
    thing becomes a list of `num_processes`. Mappings, named tuples, dataclasses, and lists that hold tensors keep their form.
    """
    if not accelerator.use_distributed:
        return input_data
    state = accelerator.gradient_state
    last, wanted = state.end_of_dataloader, state.remainder
    if last and wanted < 0:
        warnings.warn(
            "The data loader cannot tell which samples of its last batch are repeated ones, so they are counted twice. "
            "Prepare it with this Accelerator, or with even_batches=False.",
            stacklevel=3,
        )
    own: list[int | None] = []
    _walk(input_data, use_gather_object, lambda leaf: own.append(_samples(leaf)))
    # The end of a loop is the only place where processes may have different numbers of samples.
    lengths: list[list[int | None]] = gather_object([own]) if last else [own] * accelerator.num_processes
    if len({len(of_rank) for of_rank in lengths}) > 1:
        # The collectives themselves say what differs.
        return gather(input_data)
    positions = iter(range(len(own)))

    def joined(leaf: Any) -> Any:
        position = next(positions)
        each = [of_rank[position] for of_rank in lengths]
        if isinstance(leaf, torch.Tensor) and not use_gather_object:
            values: Any = _gather_rows(leaf, each)
        else:
            values = gather_object(list(leaf) if isinstance(leaf, (list, tuple)) else [leaf])
        counts = [count for count in each if count is not None]
        if wanted <= 0 or len(counts) < len(each):
            return values
        # Of batches of different lengths whole ones were repeated, in the last processes. Nothing else of different lengths was filled up.
        return values[:wanted] if len(set(counts)) == 1 or wanted in accumulate(counts[:-1]) else values

    return _walk(input_data, use_gather_object, joined)


def _walk(data: Any, objects: bool, function: Callable[[Any], Any]) -> Any:
    named = isinstance(data, Mapping) or is_namedtuple(data) or is_dataclass_instance(data)
    if named or (isinstance(data, (list, tuple)) and not objects and _holds_tensors(data)):
        return rebuilt(data, [_walk(value, objects, function) for value in children(data) or ()])
    return function(data)


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, torch.Tensor) or any(map(_holds_tensors, children(data) or ()))


def _samples(leaf: Any) -> int | None:
    """Samples of one leaf; None for one that does not count any."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape[0] if leaf.dim() else None
    return len(leaf) if isinstance(leaf, (list, tuple)) else None


def _gather_rows(tensor: torch.Tensor, each: list[int | None]) -> torch.Tensor:
    """Tensors of all processes below each other, where process i has `each[i]` rows."""
    rows = [count for count in each if count is not None]
    if len(set(rows)) < 2:
        return gather(tensor)
    most = max(rows)
    filled = torch.cat([tensor, tensor.new_zeros((most - tensor.shape[0], *tensor.shape[1:]))])
    return torch.cat([part[:count] for part, count in zip(gather(filled).split(most), rows, strict=True)])
