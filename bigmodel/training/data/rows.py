"""Batches as rows: counting the samples of a nested structure, cutting them out, and joining those of several batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...structures import children, is_namedtuple, keys, rebuilt

__all__ = ["cut_rows", "flatten", "join_rows", "rebuild", "row_count", "short_rows"]


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a leaf was taken out of a structure."""

    index: int
    """Its place in the list of leaves."""


def _is_container(value: Any) -> bool:
    inside = children(value)
    if inside is None:
        return False
    if isinstance(value, (list, tuple)) and not is_namedtuple(value):
        # A list without anything nested is a column: the strings or numbers of a batch, one a sample.
        return any(isinstance(item, (torch.Tensor, np.ndarray)) or children(item) is not None for item in inside)
    return True


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The container `value` with `function` of every item, of the same type."""
    return rebuilt(value, [function(item) for item in children(value) or ()])


def flatten(value: Any, leaves: list[Any]) -> Any:
    """The structure of `value` with holes in the place of its leaves, which are appended to `leaves`.

    Lists, tuples, mappings and dataclasses are structure; tensors, arrays, columns (flat lists of strings or numbers) and anything else
    are leaves.
    """
    if _is_container(value):
        return _mapped(value, lambda item: flatten(item, leaves))
    leaves.append(value)
    return Hole(len(leaves) - 1)


def rebuild(structure: Any, leaves: Sequence[Any]) -> Any:
    """What `flatten` took apart, with these leaves."""
    if isinstance(structure, Hole):
        return leaves[structure.index]
    return _mapped(structure, lambda item: rebuild(item, leaves))


def _rows_of_leaf(leaf: Any) -> int | None:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf.shape[0] if leaf.ndim else None
    return len(leaf) if isinstance(leaf, (list, tuple)) else None


def _columns(batch: Any) -> int | None:
    """Rows of every leaf that has any; None where they differ or there are none."""
    leaves: list[Any] = []
    flatten(batch, leaves)
    counts = {count for leaf in leaves if (count := _rows_of_leaf(leaf)) is not None}
    return counts.pop() if len(counts) == 1 else None


def row_count(batch: Any) -> int | None:
    """Samples of a batch: the common first dimension of its tensors and columns.

    A list whose items have no common one is a list of samples. None: neither.
    """
    rows = _columns(batch)
    if rows is None and isinstance(batch, list):
        return len(batch)
    return rows


def short_rows(batch: Any, full: int | None) -> tuple[int, int] | None:
    """Samples of a batch and of a full one, where the batch has fewer; None where it is full or nobody can tell."""
    rows = row_count(batch)
    return None if rows is None or full is None or rows >= full else (rows, full)


def cut_rows(batch: Any, rows: slice) -> Any:
    """The samples `rows` of a batch that `row_count` has counted; what has no rows comes whole."""
    if _columns(batch) is None:
        return batch[rows]
    leaves: list[Any] = []
    structure = flatten(batch, leaves)
    return rebuild(structure, [leaf if _rows_of_leaf(leaf) is None else leaf[rows] for leaf in leaves])


def join_rows(batches: Sequence[Any]) -> Any:
    """One batch with the samples of all, in order; None where they do not fit together: other structures, dtypes, lengths of a row."""
    columns = [_columns(batch) for batch in batches]
    if all(count is None for count in columns) and all(isinstance(batch, list) for batch in batches):
        return [sample for batch in batches for sample in batch]
    if None in columns:
        return None
    taken_apart: list[list[Any]] = [[] for _ in batches]
    structures = [flatten(batch, leaves) for batch, leaves in zip(batches, taken_apart, strict=True)]
    if any(not _same(structure, structures[0]) for structure in structures):
        return None
    joined = []
    for leaves in zip(*taken_apart, strict=True):
        leaf = _joined_leaf(leaves)
        if leaf is None and leaves[0] is not None:
            return None
        joined.append(leaf)
    return rebuild(structures[0], joined)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Hole):
        return one == other
    return list(keys(one)) == list(keys(other)) and all(map(_same, children(one) or (), children(other) or ()))


def _joined_leaf(leaves: Sequence[Any]) -> Any:
    """None where the leaves do not fit together."""
    first = leaves[0]
    if len({type(leaf) for leaf in leaves}) > 1:
        return None
    if isinstance(first, (torch.Tensor, np.ndarray)):
        if first.ndim and len({(leaf.dtype, leaf.shape[1:]) for leaf in leaves}) == 1:
            return torch.cat(list(leaves)) if isinstance(first, torch.Tensor) else np.concatenate(leaves)
        return first if not first.ndim and all(leaf.dtype == first.dtype and bool(leaf == first) for leaf in leaves) else None
    if isinstance(first, (list, tuple)):
        return type(first)(value for leaf in leaves for value in leaf)
    return first if all(leaf == first for leaf in leaves) else None
