"""Small unsigned integers that lie side by side in larger ones, and the floats that they stand for."""

from __future__ import annotations

from typing import Final

import torch

from ..errors import CheckpointError
from .entry import Entry
from .finite import adds_up, refuse_not_finite

__all__ = ["NIBBLES", "columns_at_once", "dequantized", "refuse_other_groups", "split_words"]

NIBBLES: Final = 8
"""4-bit integers of an int32."""


def split_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (…, n) → uint8 (…, n × 32 / bits): the integers of `bits` (2, 4 or 8) of each, the lowest bits first."""
    parts = words.flatten().view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * 4)
    if bits == 8:
        return parts
    mask = (1 << bits) - 1
    return torch.stack([parts >> shift & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def dequantized(
    integers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, scale: Entry, group_of: torch.Tensor | None = None
) -> torch.Tensor:
    """(integer - zero) × scale, float32 (rows, columns). `zeros` (rows, groups) and `scales` (rows, groups) belong to equal groups of
    neighbouring columns, or to that of each column which `group_of` (columns) names.

    Raises `CheckpointError`, naming `scale`, the entry that they were read from, for scales that are NaN or infinite.
    """
    given = scales
    if group_of is not None:
        groups, counts = group_of.unique_consecutive(return_counts=True)
        if (counts == counts[0]).all():
            zeros, scales, group_of = zeros[:, groups], scales[:, groups], None
    # Operands of one dtype: torch would make whole copies of others.
    values, zeros, scales = (each.to(torch.float32) for each in (integers, zeros, scales))
    if not adds_up(scales):
        refuse_not_finite(given, scale.name, scale.file)
    if group_of is not None:
        return values.sub_(zeros[:, group_of]).mul_(scales[:, group_of])
    grouped = values.view(len(values), scales.shape[1], -1)
    grouped.sub_(zeros[..., None]).mul_(scales[..., None])
    return values


def columns_at_once(at_once_bytes: int, rows: int, group: int, step: int) -> int:
    """How many columns (of `rows` float32) come at once: whole groups, or else a multiple of `step` within one."""
    most = at_once_bytes // max(1, rows * 4)
    if most >= group and group % step == 0:
        return most // group * group
    return max(1, min(most, group) // step) * step


def refuse_other_groups(entry: Entry, group_of: torch.Tensor, count: int) -> None:
    """Raises `CheckpointError`, naming the entry that they were read from, where groups are not among the `count` that have scales."""
    if not ((group_of >= 0) & (group_of < count)).all():
        raise CheckpointError(f"{entry.file}: {entry.name!r}: damaged: names groups beyond the {count} that have scales.")
