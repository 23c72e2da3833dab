"""Whether scales are numbers: one that is NaN or infinite makes nonsense of every weight that it belongs to, without a word."""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from .location import CheckpointFile

__all__ = ["adds_up", "refuse_not_finite"]


def adds_up(values: torch.Tensor) -> bool:
    """True only where all values are finite: their sum is read at the pace of memory and keeps what is not; it may also grow too large."""
    return bool(values.sum(dtype=torch.float32).isfinite())


def refuse_not_finite(scales: torch.Tensor, name: str, file: CheckpointFile) -> None:
    """Raises `CheckpointError`, with the numbers, where some of the scales of the tensor `name` in `file` are NaN or infinite."""
    values = scales if scales.dtype.itemsize > 1 else scales.to(torch.float32)
    count = 0 if adds_up(values) else int((~values.isfinite()).sum())
    if count:
        raise CheckpointError(
            f"{file}: {name!r}: {count} of the {values.numel()} scales that were read are NaN or infinite, and so would be the weights "
            "that they belong to. Get the checkpoint again; if its original is like that, it was not quantized well."
        )
