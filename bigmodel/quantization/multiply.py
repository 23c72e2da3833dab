"""The product with a packed weight, and its gradients: those of the input and the bias; the weight is frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["multiply"]

Packed = Mapping[str, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor | None, Packed], torch.Tensor]
Unpack = Callable[[Packed], torch.Tensor]


def multiply(x: torch.Tensor, bias: torch.Tensor | None, packed: Packed, product: Product, unpack: Unpack) -> torch.Tensor:
    """`product(x, bias, packed)` for x (…, in_features).

    For the backward the packed tensors are saved as autograd saves any tensor, so that those of offloaded layers are kept by name and
    fetched again; `unpack` makes the weight (out_features, in_features) of them.
    """
    wants_gradient = x.requires_grad or (bias is not None and bias.requires_grad)
    if not (wants_gradient and torch.is_grad_enabled()):
        return product(x, bias, packed)
    result: torch.Tensor = _Product.apply(x, bias, product, unpack, tuple(packed), *packed.values())
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        unpack: Unpack,
        names: tuple[str, ...],
        *packed: torch.Tensor,
    ) -> torch.Tensor:
        ctx.unpack, ctx.names = unpack, names
        ctx.save_for_backward(*packed)
        return product(x, bias, dict(zip(names, packed, strict=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.unpack(dict(zip(ctx.names, ctx.saved_tensors, strict=True))).to(gradient.dtype)
            of_x = torch.matmul(gradient, weight)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.sum(tuple(range(gradient.dim() - 1)))
        return of_x, of_bias, *(None for _ in ctx.needs_input_grad[2:])
