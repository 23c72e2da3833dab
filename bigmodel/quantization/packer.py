"""Packs weights while they are loaded: a `bigmodel.protocols.Packer` for the linear layers of a model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import nn

from ..protocols import Packing, TensorSpec
from .formats import BLOCK, FourBit, PackedFormat
from .matrices import is_transposed

__all__ = ["WeightPacker"]


class WeightPacker:
    """Packs the weights of `layers` (by full name), and stacks of matrices (full names of the parameters), in one format.

    What is kept of a layer's weight stands beside it, and what is kept of a stack below it.
    """

    def __init__(self, packing: PackedFormat, layers: Mapping[str, nn.Module], stacks: Collection[str] = ()) -> None:
        self._packing = packing
        self._transposed = {f"{name}.weight": is_transposed(layer) for name, layer in layers.items()}
        self._transposed |= dict.fromkeys(stacks, False)
        self._prefixes = {name: f"{name}." for name in stacks}

    def takes(self, name: str) -> bool:
        """Whether `name` is the weight of one of the layers, or one of the stacks."""
        return name in self._transposed

    def transposed(self, name: str) -> bool:
        """Whether the layer keeps this weight as (in, out); packed ones are (out, in)."""
        return self._transposed[name]

    def kept(self, name: str, spec: TensorSpec) -> Mapping[str, TensorSpec]:
        """The packed weight and its companions, by full name."""
        prefix = self._prefix(name)
        return {prefix + part: kept for part, kept in self._packing.tensors(spec.shape).items()}

    def row_step(self, spec: TensorSpec) -> int:
        """Rows that end where blocks end, in whole bytes; any row where each has its own scale."""
        if not isinstance(self._packing, FourBit):
            return 1
        whole = math.lcm(BLOCK, 2 * self._packing.storage.itemsize)
        row = max(1, spec.shape[-1])
        return whole // math.gcd(whole, row)

    def begin(self, name: str, spec: TensorSpec, device: torch.device) -> Packing:
        """The way of one weight."""
        from .packings import Packing4bit, Packing8bit  # imports bitsandbytes, which takes seconds

        prefix = self._prefix(name)
        if isinstance(self._packing, FourBit):
            return Packing4bit(prefix, spec.shape, self._packing, device)
        return Packing8bit(prefix, spec.shape, device)

    def _prefix(self, name: str) -> str:
        return self._prefixes.get(name) or name.removesuffix("weight")
