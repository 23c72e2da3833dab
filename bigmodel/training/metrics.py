"""Results of all processes for a metric: every sample once, also where the last batch was filled up with repeated ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DistributedOperationException
from ..structures import children, is_dataclass_instance, is_namedtuple, rebuilt
from .collectives import gather, gather_object

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["gather_for_metrics"]


def gather_for_metrics(accelerator: Accelerator, input_data: Any, use_gather_object: bool) -> Any:
    """`input_data` of all processes in the order of the data, without the samples that a loader repeated to fill its last batch.

    Tensors are joined along their first dimension, which counts samples, of which processes may have different numbers; those without
    dimensions become one of `num_processes` values. Lists and tuples without tensors in them are lists of samples, whatever these are, and
    are joined to one list. Any other single thing becomes a list of `num_processes`; None stays None. Mappings, named tuples, dataclasses,
    and lists that hold tensors keep their form. Of processes that share a model, and see the same samples, the first one counts.

    What has as many rows as a full batch, after a last batch that is shorter, is cut to the samples there are: a loss, say, that a script
    repeats once for each sample, going by the batch size.
    """
    state = accelerator.gradient_state
    last, wanted = state.end_of_dataloader, state.remainder
    short = getattr(state.active_dataloader, "short_end", None) if last else None
    if short is not None:
        rows, full = short
        input_data = _walk(input_data, use_gather_object, lambda leaf: leaf[:rows] if _samples(leaf) == full else leaf)
    if not accelerator.use_distributed:
        return input_data
    ranks = accelerator.strategy.data_ranks or range(accelerator.num_processes)
    if len(ranks) == 1:  # nothing is repeated
        wanted = 0
    if last and wanted < 0:
        warnings.warn(
            "The data loader cannot tell which samples of its last batch are repeated ones, so they are counted twice. "
            "Prepare it with this Accelerator, or with even_batches=False.",
            stacklevel=3,
        )
    leaves: list[Any] = []
    _walk(input_data, use_gather_object, leaves.append)
    own = [_samples(leaf) for leaf in leaves]
    lengths = _lengths(own) if last else [[count] * accelerator.num_processes for count in own]
    if lengths is None:
        return gather(input_data)  # says what differs
    try:
        joined = _joined(input_data, leaves, lengths, use_gather_object, ranks)
    except DistributedOperationException:  # in all processes
        # Before the end of a loop all have as many samples, unless the script has chosen among them.
        lengths = _lengths(own)
        if lengths is None or all(len(set(each)) == 1 for each in lengths):
            raise
        joined = _joined(input_data, leaves, lengths, use_gather_object, ranks)
    counted = [[each[rank] for rank in ranks] for each in lengths]
    results = iter([values[:wanted] if _was_filled_up(each, wanted) else values for values, each in zip(joined, counted, strict=True)])
    return _walk(input_data, use_gather_object, lambda leaf: next(results))


def _lengths(own: list[int | None]) -> list[list[int | None]] | None:
    """For each leaf the samples that each process has of it; None where processes have different structures."""
    of_ranks: list[list[int | None]] = gather_object([own])
    if len({len(of_rank) for of_rank in of_ranks}) > 1:
        return None
    return [list(of_leaf) for of_leaf in zip(*of_ranks, strict=True)]


def _was_filled_up(each: list[int | None], wanted: int) -> bool:
    """Whether of `each` process's samples those from number `wanted` on are repeated ones."""
    counts = [count for count in each if count is not None]
    if wanted <= 0 or len(counts) < len(each):
        return False
    # Of batches of different lengths whole ones were repeated, in the last processes. Nothing else of different lengths was filled up.
    return len(set(counts)) == 1 or wanted in accumulate(counts[:-1])


def _joined(data: Any, leaves: list[Any], lengths: list[list[int | None]], objects: bool, ranks: Sequence[int]) -> list[Any]:
    """Every leaf of the processes `ranks`: all tensors at once, then all other things."""
    as_tensors = [isinstance(leaf, torch.Tensor) and not objects for leaf in leaves]
    joined: list[Any] = [None] * len(leaves)
    if any(as_tensors):
        filled = iter(
            [_filled(leaf, each) if is_tensor else None for leaf, each, is_tensor in zip(leaves, lengths, as_tensors, strict=True)]
        )
        sent = _walk(data, objects, lambda leaf: next(filled))
        gathered: list[Any] = []
        _walk(gather(sent), objects, gathered.append)
        joined = [
            _rows(values, each, ranks) if is_tensor else None for values, each, is_tensor in zip(gathered, lengths, as_tensors, strict=True)
        ]
    things = [position for position, leaf in enumerate(leaves) if not as_tensors[position] and leaf is not None]
    if things:
        samples = [list(leaf) if isinstance(leaf, (list, tuple)) else [leaf] for leaf in (leaves[position] for position in things)]
        for position, of_leaf in zip(things, zip(*gather_object([samples]), strict=True), strict=True):
            joined[position] = [sample for rank in ranks for sample in of_leaf[rank]]
    return joined


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


def _filled(tensor: torch.Tensor, each: list[int | None]) -> torch.Tensor:
    """The tensor with as many rows as the longest of `each` process's."""
    rows = [count for count in each if count is not None]
    if len(set(rows)) < 2:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((max(rows) - tensor.shape[0], *tensor.shape[1:]))])


def _rows(gathered: torch.Tensor, each: list[int | None], ranks: Sequence[int]) -> torch.Tensor:
    """What was gathered of `_filled` tensors from the processes `ranks`, without what filled them."""
    rows = {count for count in each if count is not None}
    if len(rows) < 2 and len(ranks) == len(each):
        return gathered
    parts = gathered.chunk(len(each)) if gathered.shape[0] else [gathered] * len(each)
    return torch.cat([parts[rank][: each[rank]] for rank in ranks])
