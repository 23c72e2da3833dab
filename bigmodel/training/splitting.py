"""Each process's share of inputs that are cut into consecutive pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from ..errors import TrainingError
from ..structures import rebuilt

__all__ = ["share_bounds", "share_of"]


def share_bounds(length: int, rank: int, count: int) -> tuple[int, int]:
    """Where the share of process `rank` among `count` begins and ends: lengths differ by one at most, the longer ones first."""
    each, extra = divmod(length, count)
    start = each * rank + min(rank, extra)
    return start, start + each + (rank < extra)


def share_of(inputs: Any, rank: int, count: int, apply_padding: bool = False) -> Any:
    """The share of process `rank` among `count`; of a mapping, each value's share. A text is one thing and goes to all, whole.

    See `PartialState.split_between_processes`.

    Raises:
        TrainingError: values of a mapping that differ in length, or an input that cannot be cut.
    """
    if not isinstance(inputs, Mapping):
        return _cut(inputs, rank, count, apply_padding)
    lengths = {key: _length(value) for key, value in inputs.items() if not isinstance(value, (str, bytes))}
    if len(set(lengths.values())) > 1:
        raise TrainingError(f"Values of different lengths cannot be split together: {lengths}.")
    return rebuilt(inputs, [_cut(value, rank, count, apply_padding) for value in inputs.values()])


def _cut(values: Any, rank: int, count: int, apply_padding: bool) -> Any:
    if count == 1 or isinstance(values, (str, bytes)):
        return values
    length = _length(values)
    start, stop = share_bounds(length, rank, count)
    longest = -(-length // count)
    missing = longest - (stop - start) if apply_padding and length else 0
    if not isinstance(values, torch.Tensor) and hasattr(values, "select"):  # a table of `datasets`: its slices are no tables
        return values.select([*range(start, stop), *[length - 1] * missing])
    try:
        share, last = values[start:stop], values[length - 1 : length]
    except (TypeError, KeyError) as error:
        raise TrainingError(f"A {type(values).__name__} has no slices and cannot be split between processes.") from error
    if not missing:
        return share
    if isinstance(values, torch.Tensor):
        return torch.cat([share, *[last] * missing])
    if isinstance(values, numpy.ndarray):
        return numpy.concatenate([share, *[last] * missing])
    if isinstance(values, range):
        return [*share, *[*last] * missing]
    return share + last * missing


def _length(values: Any) -> int:
    try:
        return len(values)
    except TypeError:
        raise TrainingError(f"A {type(values).__name__} has no length and cannot be split between processes.") from None
