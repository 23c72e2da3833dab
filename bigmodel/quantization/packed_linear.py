"""A packed linear layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .config import Scheme
from .matrices import is_transposed
from .multiply import multiply
from .packed_format import PackedFormat
from .packed_weight import PackedWeight

__all__ = ["PackedLinear", "packed_layer"]


class PackedLinear(PackedWeight, nn.Linear):
    """A linear layer whose format says how it is multiplied with."""

    bias: nn.Parameter | None  # type: ignore[assignment]
    from_transposed: bool = False
    """Whether the layer that this one took the place of kept its weight as (in, out)."""

    def __init__(self, in_features: int, out_features: int, packing: PackedFormat, original_dtype: torch.dtype) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias=False, device="meta")
        self.packing, self.original_dtype = packing, original_dtype
        self._fill_with_meta()

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight, were it not packed."""
        return (self.out_features, self.in_features)

    def original_name(self, name: str) -> str:
        """Full name of the weight before it was packed, where the layer is called `name`."""
        return f"{name}.weight"

    def unpacked(self) -> torch.Tensor:
        """The weight (out_features, in_features), of `original_dtype`, that the packed bytes stand for."""
        tensors = {name: tensor.detach() for name, tensor in self.packed_tensors().items()}
        return self.packing.unpack(tensors, self.shape, self.original_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features), of the same dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        packing, shape, dtype = self.packing, self.shape, x.dtype

        def product(x: torch.Tensor, bias: torch.Tensor | None, packed: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return packing.multiply(x, bias, packed, shape)

        return multiply(x, bias, self.packed_tensors(), product, lambda packed: packing.unpack(packed, shape, dtype))

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.packing.name}"


def packed_layer(linear: nn.Module, scheme: Scheme, original_dtype: torch.dtype) -> PackedLinear:
    """The packed layer, on meta, that takes the place of `linear`; its bias is that of `linear`, frozen."""
    layer = scheme.format.layer(linear, scheme, original_dtype)
    layer.bias = linear._parameters["bias"]
    layer.from_transposed = is_transposed(linear)
    if layer.bias is not None:
        layer.bias.requires_grad_(False)
    layer.train(linear.training)
    return layer
