"""8-bit floats with a scale for each block of 128 rows and columns, as DeepSeek's checkpoints have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..protocols import Packing, TensorSpec
from .packed_format import PackedFormat, Tensors
from .stored import StoredWeight

__all__ = ["BLOCK", "Fp8Blocks"]

BLOCK: Final = 128
"""Rows, and columns, that share one scale."""
PART_ELEMENTS: Final = 1 << 21
"""What is unpacked at once: the scratch memory of the product in float32 stays small beside the matrix."""
LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
SCALES: Final = "weight_scale_inv"
"""In spite of the name that checkpoints give it, the weight is multiplied with it."""


@dataclass(frozen=True, slots=True)
class Fp8Blocks(PackedFormat):
    """One byte an element (float8_e4m3fn), and one float32 scale for each block of 128 rows and columns.

    A weight is unpacked for its product, on the device where that is: each element times its scale, in float32, then in the dtype of the
    input. Scales of what is packed here are the largest magnitude of the block over 448.
    """

    packs_transposed: ClassVar[bool] = False
    """A file so packed may be loaded as the values that it stands for, and these have to lie as the model keeps them."""

    @property
    def name(self) -> str:
        """`"fp8"`."""
        return "fp8"

    def tensors(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The packed weight and its scales: what a weight of `shape` (…, rows, columns) becomes."""
        *outer, rows, columns = shape
        scales = (*outer, -(-rows // BLOCK), -(-columns // BLOCK))
        return {"weight": TensorSpec(tuple(shape), torch.float8_e4m3fn), SCALES: TensorSpec(scales, torch.float32)}

    def row_step(self, columns: int) -> int:
        """Whole blocks."""
        return BLOCK

    def begin(self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], device: torch.device) -> Packing:
        """The way of one weight to 8-bit floats."""
        return _PackingBlocks(prefix, specs, shape, device)

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """One matrix, each element times the scale of its block; some rows of blocks at a time."""
        rows, columns = shape
        scales = tensors[SCALES].view(-1, -(-rows // BLOCK), -(-columns // BLOCK))[number]
        values = tensors["weight"].view(-1, rows, columns)[number]
        step = BLOCK * max(1, PART_ELEMENTS // max(1, BLOCK * columns))
        unpacked = torch.empty(0)
        for first in range(0, max(1, rows), step):
            part = values[first : first + step]
            spread = _spread(scales[first // BLOCK : (first + step) // BLOCK], part.shape[0], columns)
            product = part.to(torch.float32) * spread
            if first == 0:
                unpacked = torch.empty((rows, columns), dtype=dtype, device=product.device)
            unpacked[first : first + step] = product
        return unpacked

    def saved_name(self, attribute: str, weight: str, prefix: str) -> str | None:
        """Beside the weight, whatever it is called."""
        return weight if attribute == "weight" else f"{weight}_scale_inv"

    def stored(self, tensors: Mapping[str, TensorSpec]) -> list[StoredWeight]:
        """Weights in 8-bit floats whose scales are for blocks of this size."""
        found = []
        for name, spec in tensors.items():
            scales = tensors.get(f"{name}_scale_inv")
            if spec.dtype == torch.float8_e4m3fn and len(spec.shape) > 1 and scales is not None:
                expected = self.tensors(spec.shape)[SCALES].shape
                if tuple(scales.shape) == expected and scales.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    found.append(StoredWeight(name, {SCALES: f"{name}_scale_inv"}, packing=Fp8Blocks()))
        return found

    def joins(self, length: int) -> bool:
        """Where a block ends with the last row."""
        return length % BLOCK == 0

    def for_transformers(self, left: list[str]) -> dict[str, Any]:
        """As transformers' `FineGrainedFP8Config`."""
        return {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": left or None,
        }


class _PackingBlocks:
    """A matrix, or a stack of them, in parts of whole blocks of rows, or of whole matrices."""

    def __init__(self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], device: torch.device) -> None:
        self._prefix = prefix
        *outer, self._rows, self._columns = shape
        count = math.prod(outer)
        with torch.inference_mode(False):
            self._tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}
        self._values = self._tensors["weight"].view(count, self._rows, self._columns)
        self._scales = self._tensors[SCALES].view(count, -(-self._rows // BLOCK), -(-self._columns // BLOCK))

    def pack(self, start: int, rows: torch.Tensor) -> None:
        """Takes the rows `start …`."""
        with torch.no_grad():
            while rows.shape[0]:
                number, first = divmod(start, self._rows)
                part = rows[: self._rows - first]
                part = part.to(torch.float32)
                scales = _block_scales(part)
                self._scales[number, first // BLOCK : first // BLOCK + scales.shape[0]] = scales
                values = (part / _spread(scales, part.shape[0], self._columns)).clamp_(-LARGEST, LARGEST)
                self._values[number, first : first + part.shape[0]] = values.to(torch.float8_e4m3fn)
                start, rows = start + part.shape[0], rows[part.shape[0] :]

    def finish(self) -> Mapping[str, torch.Tensor]:
        """The packed weight and its scales, by full name."""
        return {self._prefix + name: tensor for name, tensor in self._tensors.items()}


def _block_scales(values: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    padded = nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK).abs().amax((1, 3))
    return torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))


def _spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The scale of every element."""
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
