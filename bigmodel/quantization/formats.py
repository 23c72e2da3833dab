"""The packed formats that people can ask for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from torch import nn

from ..errors import QuantizationError
from ..protocols import TensorSpec
from .four_bit import FourBit
from .fp8_blocks import Fp8Blocks
from .int8 import Int8
from .packed_format import PackedFormat, packed_shapes, sizes_of
from .torchao_rows import TorchaoRows

__all__ = ["FORMAT_NAMES", "weight_format", "weight_formats"]

_FORMATS: Final[Mapping[str, PackedFormat]] = {
    "nf4": FourBit("nf4"),
    "nf4-dq": FourBit("nf4", double_quant=True),
    "fp4": FourBit("fp4"),
    "fp4-dq": FourBit("fp4", double_quant=True),
    "int8": Int8(),
    "fp8": Fp8Blocks(),
    "torchao-int8": TorchaoRows("int8"),
    "torchao-float8": TorchaoRows("float8"),
}
FORMAT_NAMES: Final = tuple(_FORMATS)


def weight_format(name: str) -> PackedFormat:
    """The format of a name: bitsandbytes' `"nf4"`, `"fp4"`, each also with double quantization (`"nf4-dq"`, `"fp4-dq"`), and `"int8"`;
    8-bit floats in blocks, `"fp8"`; torchao's `"torchao-int8"` and `"torchao-float8"`.

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
        return sizes_of(self.packed, self.shapes(model))


def weight_formats(names: Iterable[str]) -> list[_OneOfSeveral]:
    """Several formats to compare for a model that does not change meanwhile; each is that of `weight_format`.

    Raises `QuantizationError` for a name that is no format's.
    """
    shapes = cache(lambda model: packed_shapes(model, Int8()))
    return [_OneOfSeveral(weight_format(name), shapes) for name in names]
