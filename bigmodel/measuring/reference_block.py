"""A decoder block without its matrices: what is left is what a block costs beside multiplying."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional

__all__ = ["HEAD_WIDTH", "MODULES", "ReferenceBlock", "activation_width"]

HEAD_WIDTH: Final = 64
MODULES: Final = 13
"""Modules that one forward runs: the block, its attention, its feed-forward part, two norms, seven projections, an activation function."""


def activation_width(width: int) -> int:
    """Elements that a token brings into and out of the matrices that a block of this width would have."""
    inner = _inner(width)
    return 4 * 2 * width + 3 * (width + inner)


def _inner(width: int) -> int:
    return 11 * width // 4


class _Projection(nn.Module):
    """Gives a tensor of the shape that a matrix would give, without computing it."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self._result = result

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._result


class _Norm(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.float()  # as models do, since squares overflow 16 bits
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
        return self._weight * exact.to(hidden.dtype)


class _Attention(nn.Module):
    def __init__(self, rows: int, width: int, like: torch.Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (_Projection(like.new_ones(1, rows, width)) for _ in range(4))
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
    def __init__(self, rows: int, width: int, like: torch.Tensor) -> None:
        super().__init__()
        self.gate, self.up = (_Projection(like.new_ones(1, rows, _inner(width))) for _ in range(2))
        self.down = _Projection(like.new_ones(1, rows, width))
        self.activation = nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


class ReferenceBlock(nn.Module):
    """Norms, rotary positions, attention over `rows` tokens, gated feed-forward, residuals: a Llama-like block, matrices left out.

    `like` gives dtype and device. The input has shape (1, rows, width); `width` is a multiple of `HEAD_WIDTH`.
    """

    def __init__(self, rows: int, width: int, like: torch.Tensor) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (_Norm(like.new_ones(width)) for _ in range(2))
        self.attention = _Attention(rows, width, like)
        self.feed_forward = _FeedForward(rows, width, like)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.first_norm(hidden))
        return hidden + self.feed_forward(self.second_norm(hidden))
