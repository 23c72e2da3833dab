"""Weights on their way to packed ones, part by part (`bigmodel.protocols.Packing`). Importing this imports bitsandbytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from .formats import BLOCK, FourBit
from .kernels import code_4bit, nested_statistics, pack_4bit, pack_8bit

__all__ = ["Packing4bit", "Packing8bit"]


class Packing4bit:
    """A weight of `shape` to 4 bits. Rows come in parts that end where blocks end."""

    def __init__(self, prefix: str, shape: tuple[int, ...], packing: FourBit, device: torch.device) -> None:
        self._prefix = prefix
        self._packing = packing
        self._row_elements = shape[-1]
        elements = math.prod(shape)
        with torch.inference_mode(False):
            self._bytes = torch.empty(-(-elements // 2), dtype=torch.uint8, device=device)
            self._absmax = torch.empty(-(-elements // BLOCK), dtype=torch.float32, device=device)

    def pack(self, start: int, rows: torch.Tensor) -> None:
        """Takes the rows `start …`."""
        with torch.no_grad():
            packed, absmax = pack_4bit(rows, self._packing.quant_type)
            first = start * self._row_elements
            self._bytes[first // 2 : first // 2 + packed.numel()] = packed
            self._absmax[first // BLOCK : first // BLOCK + absmax.numel()] = absmax

    def finish(self) -> Mapping[str, torch.Tensor]:
        """The packed weight and its companions, by full name.

        The mean of the scales is taken here, by the thread that asked for the packing: how torch sums depends on how many threads it has.
        """
        with torch.inference_mode(False), torch.no_grad():
            weight = self._bytes.view(self._packing.storage).view(-1, 1)
            found = {"weight": weight, "quant_map": code_4bit(self._packing.quant_type, weight.device), "absmax": self._absmax}
            if self._packing.double_quant:
                found |= nested_statistics(self._absmax)
            return {self._prefix + name: tensor for name, tensor in found.items()}


class Packing8bit:
    """A matrix, or a stack of them, to 8 bits a row."""

    def __init__(self, prefix: str, shape: tuple[int, ...], device: torch.device) -> None:
        self._prefix, self._shape = prefix, shape
        with torch.inference_mode(False):
            self._rows = torch.empty((math.prod(shape[:-1]), shape[-1]), dtype=torch.int8, device=device)
            self._scales = torch.empty(math.prod(shape[:-1]), dtype=torch.float32, device=device)

    def pack(self, start: int, rows: torch.Tensor) -> None:
        """Takes the rows `start …`."""
        with torch.no_grad():
            end = start + rows.shape[0]
            self._rows[start:end], self._scales[start:end] = pack_8bit(rows)

    def finish(self) -> Mapping[str, torch.Tensor]:
        """The packed weight and its scales, by full name."""
        with torch.inference_mode(False):
            weight, scales = self._rows.view(self._shape), self._scales.view(self._shape[:-1])
        return {self._prefix + "weight": weight, self._prefix + "SCB": scales}
