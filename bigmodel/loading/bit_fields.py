"""Small unsigned integers that lie side by side in larger ones."""

from __future__ import annotations

import torch

__all__ = ["NIBBLES", "split_words"]

NIBBLES = 8
"""4-bit integers of an int32."""


def split_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 (…, n) → uint8 (…, n × 32 / bits): the integers of `bits` (2, 4 or 8) of each, the lowest bits first."""
    parts = words.flatten().view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * 4)
    if bits == 8:
        return parts
    mask = (1 << bits) - 1
    return torch.stack([parts >> shift & mask for shift in range(0, 8, bits)], -1).flatten(-2)
