"""bitsandbytes' 4-bit formats. Sizes are those that `bitsandbytes.functional.quantize_4bit` allocates; nothing here imports it at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn

from ..errors import QuantizationError
from ..protocols import Packing, TensorSpec
from .matrices import matrix_shape
from .packed_format import PackedFormat, Tensors

if TYPE_CHECKING:
    from .config import Scheme
    from .packed_linear import PackedLinear

__all__ = ["BLOCK", "STATISTICS_BLOCK", "FourBit"]

BLOCK: Final = 64
"""Elements that share one scale (absmax)."""
STATISTICS_BLOCK: Final = 256
"""Scales that share one scale of their own, with double quantization."""


@dataclass(frozen=True, slots=True)
class FourBit(PackedFormat):
    """Two elements a byte; one float32 scale (absmax) for each 64 elements; the table of the 16 values that 4 bits stand for.

    With double quantization the scales take a byte each, beside one float32 for 256 of them, their mean, and the table of the values of a
    byte.
    """

    library: ClassVar[str | None] = "bitsandbytes"
    quant_type: str = "nf4"
    """`"nf4"` or `"fp4"`."""
    double_quant: bool = False
    storage: torch.dtype = torch.uint8
    """The dtype that the packed bytes are kept as."""

    @property
    def name(self) -> str:
        """`"nf4"`, `"fp4"`, `"nf4-dq"` or `"fp4-dq"` (double quantization)."""
        return f"{self.quant_type}-dq" if self.double_quant else self.quant_type

    def tensors(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The packed weight and its companions, by name: what a weight of `shape` becomes."""
        elements = math.prod(shape)
        blocks = -(-elements // BLOCK)
        packed_bytes = -(-elements // 2)
        found = {
            "weight": TensorSpec((-(-packed_bytes // self.storage.itemsize), 1), self.storage),
            "absmax": TensorSpec((blocks,), torch.uint8 if self.double_quant else torch.float32),
            "quant_map": TensorSpec((16,), torch.float32),
        }
        if self.double_quant:
            found["nested_absmax"] = TensorSpec((-(-blocks // STATISTICS_BLOCK),), torch.float32)
            found["nested_quant_map"] = TensorSpec((256,), torch.float32)
            found["nested_offset"] = TensorSpec((), torch.float32)
        return found

    def table(self, shape: tuple[int, int]) -> dict[str, TensorSpec] | None:
        """The same bytes, a block or a number in each row; None where the last block is not full, or `storage` is wider than a block."""
        blocks, rest = divmod(math.prod(shape), BLOCK)
        if rest or BLOCK // 2 % self.storage.itemsize:
            return None
        found = {name: TensorSpec((math.prod(spec.shape), 1), spec.dtype) for name, spec in self.tensors(shape).items()}
        found["weight"] = TensorSpec((blocks, BLOCK // 2 // self.storage.itemsize), self.storage)
        return found

    def row_step(self, columns: int) -> int:
        """Rows that end where blocks end, in whole bytes."""
        whole = math.lcm(BLOCK, 2 * self.storage.itemsize)
        return whole // math.gcd(whole, max(1, columns))

    def begin(self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], device: torch.device) -> Packing:
        """The way of one weight to 4 bits."""
        from .packings import Packing4bit  # imports bitsandbytes, which takes seconds

        return Packing4bit(prefix, specs, shape, self, device)

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """One matrix: the blocks that it lies in are unpacked."""
        from .kernels import unpack_4bit

        count = math.prod(shape)
        return unpack_4bit(self, tensors, number * count, count, dtype).view(shape)

    def look_up(self, tensors: Tensors, columns: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Unpacks the blocks that each of the rows lies in."""
        from .kernels import unpack_blocks_4bit

        return unpack_blocks_4bit(self, tensors, columns, rows, dtype)

    def layer(self, linear: nn.Module, scheme: Scheme, original_dtype: torch.dtype) -> PackedLinear:
        """bitsandbytes' layer."""
        from .layers import Linear4bit

        rows, columns = matrix_shape(linear)
        return Linear4bit(columns, rows, self, scheme.compute_dtype, original_dtype)

    def saved_name(self, attribute: str, weight: str, prefix: str) -> str | None:
        """Below the name of the packed bytes; the mean of the scales is part of the description."""
        if attribute == "nested_offset":
            return None
        return weight if attribute == "weight" else f"{weight}.{attribute}"

    def described(
        self, weight: str, prefix: str, shape: tuple[int, ...], dtype: torch.dtype, nested_offset: float | None
    ) -> dict[str, torch.Tensor]:
        """The description as bitsandbytes writes it."""
        from .description import DESCRIPTION, description_of

        return {f"{weight}.{DESCRIPTION}{self.quant_type}": description_of(self, shape, dtype, nested_offset)}

    def take_description(self, state_dict: dict[str, Any], weight: str, shape: tuple[int, ...]) -> tuple[torch.dtype, float | None] | None:
        """Reads what bitsandbytes has written."""
        from .description import DESCRIPTION, described

        content = state_dict.pop(f"{weight}.{DESCRIPTION}{self.quant_type}", None)
        if content is None:
            return None
        found = described(weight, content)
        if found.shape != tuple(shape) or found.double_quant != self.double_quant:
            raise QuantizationError(
                f"{weight}: packed from {list(found.shape)}, double quantization {found.double_quant}; the module has {list(shape)}, "
                f"{self.double_quant}."
            )
        return found.dtype, found.nested_offset
