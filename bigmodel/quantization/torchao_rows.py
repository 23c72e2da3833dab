"""torchao's weight-only formats with one scale a row, multiplied by torchao's kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..errors import MissingPackageError
from ..protocols import Packing, TensorSpec
from .packed_format import PackedFormat, Tensors
from .stored import StoredWeight

__all__ = ["TorchaoRows"]

KERNEL_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""What torchao unpacks to."""
DTYPES: Final[Mapping[str, torch.dtype]] = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class TorchaoRows(PackedFormat):
    """One byte an element, and one float32 scale a row: what `torchao.quantization.quantize_` makes of weights alone."""

    library: ClassVar[str | None] = "torchao"
    kind: str = "int8"
    """`"int8"` or `"float8"`."""

    @property
    def name(self) -> str:
        """`"torchao-int8"` or `"torchao-float8"`."""
        return f"torchao-{self.kind}"

    def tensors(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The packed weight and its scales: what a weight of `shape` (…, rows, columns) becomes."""
        return {"weight": TensorSpec(tuple(shape), DTYPES[self.kind]), "scale": TensorSpec((*shape[:-1], 1), torch.float32)}

    def begin(self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], device: torch.device) -> Packing:
        """The way of one weight, packed by torchao."""
        from .packings import PackingByRows

        made = self._tensor_class()
        rows = _torchao("torchao.quantization").PerRow()
        how = {"granularity": rows} if self.kind == "int8" else {"granularity": rows, "float8_dtype": DTYPES[self.kind]}

        def pack(part: torch.Tensor) -> dict[str, torch.Tensor]:
            packed = made.from_hp(part, **how)
            return {"weight": packed.qdata, "scale": packed.scale}

        return PackingByRows(prefix, specs, shape, device, pack)

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """One matrix, as torchao unpacks it (to float32, where it does not know the dtype)."""
        known = dtype if dtype in KERNEL_DTYPES else torch.float32
        found: torch.Tensor = self._tensor(tensors, shape, known, number).dequantize()
        return found.to(dtype)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        """By torchao's kernel for the device."""
        return nn.functional.linear(x, self._tensor(tensors, shape, x.dtype), bias)

    def stored(self, tensors: Mapping[str, TensorSpec]) -> list[StoredWeight]:
        """Weights with one scale a row, as state dicts of packed layers and stacks have them."""
        found = []
        for name, spec in tensors.items():
            scales = f"{name.removesuffix('weight')}scale" if name.rpartition(".")[2] == "weight" else f"{name}.scale"
            if spec.dtype == DTYPES[self.kind] and scales in tensors and tuple(tensors[scales].shape) == (*spec.shape[:-1], 1):
                found.append(StoredWeight(name, {"scale": scales}, packing=TorchaoRows(self.kind)))
        return found

    def joins(self, length: int) -> bool:
        """Each row has its scale."""
        return True

    def _tensor(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype, number: int = 0) -> Any:
        """torchao's tensor on the packed bytes."""
        values = tensors["weight"].detach().view(-1, *shape)[number]
        scales = tensors["scale"].detach().view(-1, shape[0], 1)[number]
        return self._tensor_class()(values, scales, block_size=[1, shape[1]], dtype=dtype)

    def _tensor_class(self) -> Any:
        return getattr(_torchao("torchao.quantization"), {"int8": "Int8Tensor", "float8": "Float8Tensor"}[self.kind])


def _torchao(module: str) -> Any:
    """A module of torchao, which takes seconds to import."""
    if module in sys.modules:
        return sys.modules[module]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"This packed format needs torchao 0.18 or later: pip install 'bigmodel[torchao]'. ({error})") from error
