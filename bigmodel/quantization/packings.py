"""Weights on their way to packed ones, part by part (`bigmodel.protocols.Packing`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from ..protocols import TensorSpec
from .four_bit import BLOCK, FourBit

__all__ = ["Packing4bit", "PackingByRows"]


class Packing4bit:
    """A weight of `shape` to 4 bits. Rows come in parts that end where blocks end."""

    def __init__(
        self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], packing: FourBit, device: torch.device
    ) -> None:
        self._prefix, self._specs = prefix, specs
        self._packing = packing
        self._row_elements = shape[-1]
        elements = math.prod(shape)
        with torch.inference_mode(False):
            self._bytes = torch.empty(-(-elements // 2), dtype=torch.uint8, device=device)
            self._absmax = torch.empty(-(-elements // BLOCK), dtype=torch.float32, device=device)

    def pack(self, start: int, rows: torch.Tensor) -> None:
        """Takes the rows `start …`."""
        from .kernels import pack_4bit  # imports bitsandbytes, which takes seconds

        with torch.no_grad():
            packed, absmax = pack_4bit(rows, self._packing.quant_type)
            first = start * self._row_elements
            self._bytes[first // 2 : first // 2 + packed.numel()] = packed
            self._absmax[first // BLOCK : first // BLOCK + absmax.numel()] = absmax

    def finish(self) -> Mapping[str, torch.Tensor]:
        """The packed weight and its companions, by full name.

        The mean of the scales is taken here, by the thread that asked for the packing: how torch sums depends on how many threads it has.
        """
        from .kernels import code_4bit, nested_statistics

        with torch.inference_mode(False), torch.no_grad():
            weight = self._bytes.view(self._packing.storage)
            found = {"weight": weight, "quant_map": code_4bit(self._packing.quant_type, weight.device), "absmax": self._absmax}
            if self._packing.double_quant:
                found |= nested_statistics(self._absmax)
            return {self._prefix + name: tensor.view(self._specs[name].shape) for name, tensor in found.items()}


class PackingByRows:
    """A matrix, or a stack of them, in a format that packs some rows without the others.

    `pack_rows` makes of rows (n, columns), which are counted through the matrices of a stack, a part of each packed tensor.
    """

    def __init__(
        self,
        prefix: str,
        specs: Mapping[str, TensorSpec],
        shape: tuple[int, ...],
        device: torch.device,
        pack_rows: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    ) -> None:
        self._prefix, self._pack_rows = prefix, pack_rows
        self._rows = math.prod(shape[:-1])
        with torch.inference_mode(False):
            self._tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}

    def pack(self, start: int, rows: torch.Tensor) -> None:
        """Takes the rows `start …`."""
        with torch.no_grad():
            for name, part in self._pack_rows(rows).items():
                flat = self._tensors[name].view(-1)
                first = start * flat.numel() // max(1, self._rows)
                flat[first : first + part.numel()] = part.reshape(-1)

    def finish(self) -> Mapping[str, torch.Tensor]:
        """The packed weight and its companions, by full name."""
        return {self._prefix + name: tensor for name, tensor in self._tensors.items()}
