"""bitsandbytes' 8-bit format. Sizes are those that `bitsandbytes.functional.int8_vectorwise_quant` allocates; it is imported late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ..protocols import Packing, TensorSpec
from .matrices import matrix_shape
from .packed_format import PackedFormat, Tensors

if TYPE_CHECKING:
    from .config import Scheme
    from .packed_linear import PackedLinear

__all__ = ["Int8"]


@dataclass(frozen=True, slots=True)
class Int8(PackedFormat):
    """bitsandbytes' LLM.int8(): one byte an element, and one float32 scale (SCB) a row.

    Of stacks of matrices each row of each matrix has its scale; they are unpacked before they are multiplied.
    """

    library: ClassVar[str | None] = "bitsandbytes"

    @property
    def name(self) -> str:
        """`"int8"`."""
        return "int8"

    def tensors(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The packed weight and its companion, by name: what a weight of `shape` (…, rows, columns) becomes."""
        return {"weight": TensorSpec(shape, torch.int8), "SCB": TensorSpec(shape[:-1], torch.float32)}

    def table(self, shape: tuple[int, int]) -> dict[str, TensorSpec] | None:
        """The same, with the scales as rows."""
        return {"weight": TensorSpec(shape, torch.int8), "SCB": TensorSpec((shape[0], 1), torch.float32)}

    def begin(self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], device: torch.device) -> Packing:
        """The way of one weight to 8 bits."""
        from .kernels import pack_8bit  # imports bitsandbytes, which takes seconds
        from .packings import PackingByRows

        return PackingByRows(prefix, specs, shape, device, lambda rows: dict(zip(("weight", "SCB"), pack_8bit(rows), strict=True)))

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """One matrix, by its rows and their scales."""
        from .kernels import unpack_8bit

        return unpack_8bit(tensors["weight"].view(-1, *shape)[number], tensors["SCB"].view(-1, shape[0])[number]).to(dtype)

    def look_up(self, tensors: Tensors, columns: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows times their scales."""
        from .kernels import unpack_8bit

        found, scales = (nn.functional.embedding(rows, tensors[name]) for name in ("weight", "SCB"))
        return unpack_8bit(found, scales.view(-1)).to(dtype)

    def described(
        self, weight: str, prefix: str, shape: tuple[int, ...], dtype: torch.dtype, nested_offset: float | None
    ) -> dict[str, torch.Tensor]:
        """Beside the weight of a layer: the number of the order of its elements, of which only one is left in bitsandbytes."""
        is_layers = len(shape) == 2 and weight == f"{prefix}weight"
        return {f"{prefix}weight_format": torch.tensor(0, dtype=torch.uint8)} if is_layers else {}

    def take_description(self, state_dict: dict[str, Any], weight: str, shape: tuple[int, ...]) -> tuple[torch.dtype, float | None] | None:
        """The number says nothing."""
        state_dict.pop(f"{weight.removesuffix('weight')}weight_format", None)
        return None

    def layer(self, linear: nn.Module, scheme: Scheme, original_dtype: torch.dtype) -> PackedLinear:
        """bitsandbytes' layer."""
        from .layers import Linear8bitLt

        rows, columns = matrix_shape(linear)
        return Linear8bitLt(columns, rows, self, scheme.threshold, original_dtype)
