"""Packs weights while they are loaded: a `bigmodel.protocols.Packer` for the linear layers, stacks and embeddings of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from ..protocols import Packing, TensorSpec
from .matrices import is_transposed
from .packed_format import PackedFormat

__all__ = ["WeightPacker"]


class WeightPacker:
    """Packs the weights of `layers` and `tables` (embeddings), by full name, and stacks (full names of the parameters), in one format.

    What is kept of a layer's weight stands beside it, and what is kept of a stack below it.
    """

    def __init__(
        self, packing: PackedFormat, layers: Mapping[str, nn.Module], stacks: Collection[str] = (), tables: Collection[str] = ()
    ) -> None:
        self._packing = packing
        self._transposed = {f"{name}.weight": is_transposed(layer) for name, layer in layers.items()}
        self._transposed |= dict.fromkeys(stacks, False)
        self._prefixes = {name: f"{name}." for name in stacks}
        self._tables = {f"{name}.weight" for name in tables}
        self._transposed |= dict.fromkeys(self._tables, False)

    def takes(self, name: str) -> bool:
        """Whether `name` is the weight of one of the layers or embeddings, or one of the stacks."""
        return name in self._transposed

    def transposed(self, name: str) -> bool:
        """Whether the layer keeps this weight as (in, out); packed ones are (out, in)."""
        return self._transposed[name]

    def kept(self, name: str, spec: TensorSpec) -> Mapping[str, TensorSpec]:
        """The packed weight and its companions, by full name."""
        prefix = self._prefix(name)
        return {prefix + part: kept for part, kept in self._specs(name, spec.shape).items()}

    def row_step(self, spec: TensorSpec) -> int:
        """Rows that parts may begin at."""
        return self._packing.row_step(spec.shape[-1])

    def begin(self, name: str, spec: TensorSpec, device: torch.device) -> Packing:
        """The way of one weight."""
        return self._packing.begin(self._prefix(name), self._specs(name, spec.shape), spec.shape, device)

    def _specs(self, name: str, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        if name not in self._tables:
            return self._packing.tensors(shape)
        rows, columns = shape
        found = self._packing.table((rows, columns))
        assert found is not None, name  # it was not selected then
        return found

    def _prefix(self, name: str) -> str:
        return self._prefixes.get(name) or name.removesuffix("weight")
