"""A decoder block whose matrices do not count: what is left is what a block costs beside multiplying."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional

__all__ = ["HEAD_WIDTH", "MODULES", "ReferenceBlock", "activation_width", "inner_width"]

HEAD_WIDTH: Final = 64
MODULES: Final = 13
"""Modules that one forward runs: the block, its attention, its feed-forward part, two norms, seven projections, an activation function."""


def activation_width(width: int) -> int:
    """Elements that a token brings into and out of the matrices that a block of this width would have."""
    inner = inner_width(width)
    return 4 * 2 * width + 3 * (width + inner)


def inner_width(width: int) -> int:
    """Of the feed-forward part of a block of this width."""
    return 11 * width // 4


class _Projection(nn.Module):
    """Multiplies with a matrix and counts how long that takes; without one, gives a tensor of the right shape."""

    def __init__(self, outputs: int, inputs: int, rows: int, like: torch.Tensor, matrix: torch.Tensor | None) -> None:
        super().__init__()
        self._matrix = None if matrix is None else matrix.view(-1)[: outputs * inputs].view(outputs, inputs)
        self._result = like.new_ones(1, rows, outputs) if matrix is None else None
        self.spent_seconds = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._matrix is None:
            assert self._result is not None
            return self._result
        started = time.perf_counter()
        result = functional.linear(hidden, self._matrix)
        self.spent_seconds += time.perf_counter() - started
        return result


class _Norm(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.float()  # as models do, since squares overflow 16 bits
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
        return self._weight * exact.to(hidden.dtype)


class _Attention(nn.Module):
    def __init__(self, rows: int, width: int, like: torch.Tensor, matrices: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (_Projection(width, width, rows, like, matrix) for matrix in matrices)
        self._cosine, self._sine = like.new_ones(rows, HEAD_WIDTH), like.new_zeros(rows, HEAD_WIDTH)

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * self._cosine + torch.cat((-second, first), dim=-1) * self._sine

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(self._turned(query), self._turned(key), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, rows: int, width: int, like: torch.Tensor, matrices: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.gate, self.up = (_Projection(inner_width(width), width, rows, like, matrix) for matrix in matrices[:2])
        self.down = _Projection(width, inner_width(width), rows, like, matrices[2])
        self.activation = nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


class ReferenceBlock(nn.Module):
    """Norms, rotary positions, attention over `rows` tokens, gated feed-forward, residuals: a Llama-like block.

    `like` gives dtype and device. The input has shape (1, rows, width); `width` is a multiple of `HEAD_WIDTH`. The seven `matrices` have
    `width` × `inner_width(width)` elements or more each; without them nothing is multiplied.
    """

    def __init__(self, rows: int, width: int, like: torch.Tensor, matrices: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        of_projections = [None] * 7 if matrices is None else matrices
        self.first_norm, self.second_norm = (_Norm(like.new_ones(width)) for _ in range(2))
        self.attention = _Attention(rows, width, like, of_projections[:4])
        self.feed_forward = _FeedForward(rows, width, like, of_projections[4:])
        self._projections = [module for module in self.modules() if isinstance(module, _Projection)]

    @property
    def multiplying_seconds(self) -> float:
        """Time spent on matrices so far (of the caller: only where calls wait for the device)."""
        return sum(projection.spent_seconds for projection in self._projections)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.first_norm(hidden))
        return hidden + self.feed_forward(self.second_norm(hidden))
