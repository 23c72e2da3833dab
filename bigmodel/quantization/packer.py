"""Packs weights while they are loaded: a `bigmodel.protocols.Packer` for the linear layers of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from ..protocols import Packing, TensorSpec
from .formats import BLOCK, FourBit, PackedFormat
from .matrices import is_transposed

__all__ = ["WeightPacker"]


class WeightPacker:
    """Packs the weights of `layers` (by full name) in one format. What is kept stands beside each weight, by its own name."""

    def __init__(self, packing: PackedFormat, layers: Mapping[str, nn.Module]) -> None:
        self._packing = packing
        self._transposed = {f"{name}.weight": is_transposed(layer) for name, layer in layers.items()}

    def takes(self, name: str) -> bool:
        """Whether `name` is the weight of one of the layers."""
        return name in self._transposed

    def transposed(self, name: str) -> bool:
        """Whether the layer keeps this weight as (in, out); packed ones are (out, in)."""
        return self._transposed[name]

    def kept(self, name: str, spec: TensorSpec) -> Mapping[str, TensorSpec]:
        """The packed weight and its companions, by full name."""
        prefix = name.removesuffix("weight")
        return {prefix + part: kept for part, kept in self._packing.tensors(spec.shape).items()}

    def row_step(self, spec: TensorSpec) -> int:
        """Rows that end where blocks end, in whole bytes; any row where each has its own scale."""
        if not isinstance(self._packing, FourBit):
            return 1
        whole = math.lcm(BLOCK, 2 * self._packing.storage.itemsize)
        row = max(1, math.prod(spec.shape[1:]))
        return whole // math.gcd(whole, row)

    def begin(self, name: str, spec: TensorSpec, device: torch.device) -> Packing:
        """The way of one weight."""
        from .packings import Packing4bit, Packing8bit  # imports bitsandbytes, which takes seconds

        prefix = name.removesuffix("weight")
        if isinstance(self._packing, FourBit):
            return Packing4bit(prefix, spec.shape, self._packing, device)
        return Packing8bit(prefix, spec.shape, device)
