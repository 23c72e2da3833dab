"""The packed formats: what is packed, and the exact bytes of a weight with all its companions.

Sizes are those that bitsandbytes allocates (`functional.quantize_4bit`, `functional.int8_vectorwise_quant`); nothing here imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import torch
from torch import nn

from ..errors import QuantizationError
from ..protocols import TensorSpec
from .matrices import matrix_shape
from .selection import select

__all__ = ["FORMAT_NAMES", "FourBit", "Int8", "PackedFormat", "weight_format", "weight_formats"]

BLOCK: Final = 64
"""Elements that share one scale (absmax)."""
STATISTICS_BLOCK: Final = 256
"""Scales that share one scale of their own, with double quantization."""


@dataclass(frozen=True, slots=True)
class FourBit:
    """bitsandbytes' 4-bit formats, a `bigmodel.protocols.WeightFormat`.

    Two elements a byte; one float32 scale (absmax) for each 64 elements; the table of the 16 values that 4 bits stand for. With double
    quantization the scales take a byte each, beside one float32 for 256 of them, their mean, and the table of the values of a byte.
    """

    quant_type: str = "nf4"
    """`"nf4"` or `"fp4"`."""
    double_quant: bool = False
    storage: torch.dtype = torch.uint8
    """The dtype that the packed bytes are kept as."""
    skip_modules: tuple[str, ...] | None = None
    """Names of modules that are left as they are; None: the output head and tied weights (`keep_list`)."""
    kept: tuple[str, ...] = ()
    """Names of more modules that are left as they are."""

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

    def packed_bytes(self, spec: TensorSpec) -> int:
        """Bytes of one weight of this shape once packed, companions included."""
        return _bytes(self.tensors(spec.shape))

    def packed_sizes(self, model: nn.Module) -> Mapping[str, int]:
        """Bytes once packed, by every full name of each parameter of `model` that is packed."""
        return _sizes(self, model)


@dataclass(frozen=True, slots=True)
class Int8:
    """bitsandbytes' LLM.int8(), a `bigmodel.protocols.WeightFormat`: one byte an element, and one float32 scale (SCB) a row.

    Of stacks of matrices each row of each matrix has its scale; they are unpacked before they are multiplied.
    """

    skip_modules: tuple[str, ...] | None = None
    """Names of modules that are left as they are; None: the output head and tied weights (`keep_list`)."""
    kept: tuple[str, ...] = ()
    """Names of more modules that are left as they are."""

    @property
    def name(self) -> str:
        """`"int8"`."""
        return "int8"

    def tensors(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The packed weight and its companion, by name: what a weight of `shape` (…, rows, columns) becomes."""
        return {"weight": TensorSpec(shape, torch.int8), "SCB": TensorSpec(shape[:-1], torch.float32)}

    def packed_bytes(self, spec: TensorSpec) -> int:
        """Bytes of one weight of this shape (…, rows, columns) once packed, scales included."""
        return _bytes(self.tensors(spec.shape))

    def packed_sizes(self, model: nn.Module) -> Mapping[str, int]:
        """Bytes once packed, by every full name of each parameter of `model` that is packed."""
        return _sizes(self, model)


def _bytes(tensors: Mapping[str, TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in tensors.values())


PackedFormat: TypeAlias = FourBit | Int8


def _sizes(packed: PackedFormat, model: nn.Module) -> dict[str, int]:
    return _sizes_of_shapes(packed, _shapes(model, packed.skip_modules, packed.kept))


def _shapes(model: nn.Module, skip_modules: Collection[str] | None, kept: Collection[str]) -> dict[str, tuple[int, ...]]:
    """(rows, columns) of every weight, and (experts, rows, columns) of every stack of matrices, that is packed."""
    chosen = select(model, skip_modules, kept)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": matrix_shape(module) for name, module in chosen.packed.items()}
    return shapes | {name: tuple(stack.shape) for name, stack in chosen.stacks.items()}


def _sizes_of_shapes(packed: PackedFormat, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    known = {shape: _bytes(packed.tensors(shape)) for shape in set(shapes.values())}
    return {name: known[shape] for name, shape in shapes.items()}


_FORMATS: Final[Mapping[str, PackedFormat]] = {
    "nf4": FourBit("nf4"),
    "nf4-dq": FourBit("nf4", double_quant=True),
    "fp4": FourBit("fp4"),
    "fp4-dq": FourBit("fp4", double_quant=True),
    "int8": Int8(),
}
FORMAT_NAMES: Final = tuple(_FORMATS)


def weight_format(name: str) -> PackedFormat:
    """The format of a name: `"nf4"`, `"fp4"`, each also with double quantization (`"nf4-dq"`, `"fp4-dq"`), or `"int8"`.

    The output head and tied weights are left as they are. Raises `QuantizationError` (a ValueError) for another name.
    """
    found = _FORMATS.get(name)
    if found is None:
        raise QuantizationError(f"{name!r} is no packed format. Use one of {', '.join(map(repr, FORMAT_NAMES))}.")
    return found


@dataclass(frozen=True, slots=True)
class _OneOfSeveral:
    """A format among others for one model, a `bigmodel.protocols.WeightFormat`: what they pack is found once for all of them."""

    packed: PackedFormat
    shapes: Callable[[nn.Module], Mapping[str, tuple[int, ...]]]

    @property
    def name(self) -> str:
        return self.packed.name

    def packed_bytes(self, spec: TensorSpec) -> int:
        return self.packed.packed_bytes(spec)

    def packed_sizes(self, model: nn.Module) -> Mapping[str, int]:
        return _sizes_of_shapes(self.packed, self.shapes(model))


def weight_formats(names: Iterable[str]) -> list[_OneOfSeveral]:
    """Several formats to compare for a model that does not change meanwhile; each is that of `weight_format`.

    Raises `QuantizationError` for a name that is no format's.
    """
    shapes = cache(lambda model: _shapes(model, None, ()))
    return [_OneOfSeveral(weight_format(name), shapes) for name in names]
