"""What a packed format has to know: the bytes of a weight with its companions, how it is packed and unpacked, its names in files.

A format is one class derived from `PackedFormat`, in a file of its own; `formats.py` names those that people can ask for by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import nn

from ..protocols import Packing, TensorSpec
from .matrices import is_transposed, matrix_shape
from .selection import Selection, select

if TYPE_CHECKING:
    from .config import Scheme
    from .packed_linear import PackedLinear
    from .stored import StoredWeight

__all__ = ["PackedFormat", "Tensors", "chosen_by", "packed_shapes", "sizes_of"]

Tensors: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedFormat(ABC):
    """A packed format, a `bigmodel.protocols.WeightFormat`.

    A packed weight is some tensors by name: the packed bytes are `"weight"`, beside them stand their companions (scales, …).
    """

    library: ClassVar[str | None] = None
    """The package that packs, whose release may decide the packed bytes; None where this one does."""
    packs_transposed: ClassVar[bool] = True
    """Whether layers that keep their weight as (in, out) are packed too, as (out, in)."""
    skip_modules: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Names of modules that are left as they are; None: the output head and tied weights (`keep_list`)."""
    kept: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of more modules that are left as they are."""
    embeddings: bool = field(default=False, kw_only=True)
    """Whether embedding tables are packed as well."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it: `"nf4"`, `"int8"`."""

    @abstractmethod
    def tensors(self, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The packed weight and its companions, by name: what a matrix, or a stack of matrices, of `shape` (…, rows, columns) becomes."""

    def table(self, shape: tuple[int, int]) -> dict[str, TensorSpec] | None:
        """The same for an embedding table, in a layout that single rows can be taken from; None where the format cannot."""
        return None

    def row_step(self, columns: int) -> int:
        """Rows of `columns` elements are packed in parts that begin at multiples of this."""
        return 1

    @abstractmethod
    def begin(self, prefix: str, specs: Mapping[str, TensorSpec], shape: tuple[int, ...], device: torch.device) -> Packing:
        """The way of a weight of `shape`, in parts, to tensors of `specs` (`tensors` or `table`), whose full names start with `prefix`."""

    @abstractmethod
    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype, number: int = 0) -> torch.Tensor:
        """One matrix of `shape` (rows, columns): the weight itself, or that with this number in a stack."""

    def look_up(self, tensors: Tensors, columns: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows `rows` (n, int64) of a packed table, (n, columns), without unpacking others."""
        raise NotImplementedError

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
        """x (…, columns) times the weight of `shape` (rows, columns), transposed, plus the bias; of the dtype of x."""
        return nn.functional.linear(x, self.unpack(tensors, shape, x.dtype), bias)

    def layer(self, linear: nn.Module, scheme: Scheme, original_dtype: torch.dtype) -> PackedLinear:
        """The packed layer, on meta and without a bias, that takes the place of `linear`."""
        from .packed_linear import PackedLinear

        rows, columns = matrix_shape(linear)
        return PackedLinear(columns, rows, self, original_dtype)

    def saved_name(self, attribute: str, weight: str, prefix: str) -> str | None:
        """The name of a tensor in a state dict; None for what the description says. `weight`: full name of the packed bytes there,
        `prefix`: what other full names of the module start with.
        """
        return weight if attribute == "weight" else prefix + attribute

    def described(
        self, weight: str, prefix: str, shape: tuple[int, ...], dtype: torch.dtype, nested_offset: float | None
    ) -> dict[str, torch.Tensor]:
        """What a state dict says of the weight beside its tensors, by full name."""
        return {}

    def take_description(self, state_dict: dict[str, Any], weight: str, shape: tuple[int, ...]) -> tuple[torch.dtype, float | None] | None:
        """Takes it out of a state dict that is loaded: the dtype that the weight was packed from, and its `nested_offset`.

        Raises `QuantizationError` for the description of a weight that is another one, or is packed in another way.
        """
        return None

    def stored(self, tensors: Mapping[str, TensorSpec]) -> list[StoredWeight]:
        """The weights of a checkpoint that are in this format already, for one that says nothing of it itself."""
        return []

    def joins(self, length: int) -> bool:
        """Whether packed matrices of this many rows (columns) can be put one below (beside) the other as they are, scales and all."""
        return False

    def for_transformers(self, left: list[str]) -> dict[str, Any] | None:
        """What `config.json` says of a model so packed, whose layers `left` are not; None where transformers cannot load it."""
        return None

    def packed_bytes(self, spec: TensorSpec) -> int:
        """Bytes of one weight of this shape (…, rows, columns) once packed, companions included."""
        return bytes_of(self.tensors(spec.shape))

    def packed_sizes(self, model: nn.Module) -> Mapping[str, int]:
        """Bytes once packed, by every full name of each parameter of `model` that is packed."""
        return sizes_of(self, packed_shapes(model, self))


def sizes_of(packing: PackedFormat, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of weights of these shapes once packed, by name."""
    known = {shape: bytes_of(packing.tensors(shape)) for shape in set(shapes.values())}
    return {name: known[shape] for name, shape in shapes.items()}


def chosen_by(packing: PackedFormat, model: nn.Module) -> Selection:
    """What the format packs of a model, and why the rest is left."""
    tables = (lambda shape: packing.table(shape) is not None) if packing.embeddings else None
    found = select(model, packing.skip_modules, packing.kept, tables)
    if not packing.packs_transposed:
        for name in [name for name, layer in found.packed.items() if is_transposed(layer)]:
            del found.packed[name]
            found.left[name] = f"it keeps its weight transposed, which {packing.name} does not pack"
    return found


def bytes_of(tensors: Mapping[str, TensorSpec]) -> int:
    """Bytes of all these tensors."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in tensors.values())


def packed_shapes(model: nn.Module, packing: PackedFormat) -> dict[str, tuple[int, ...]]:
    """(rows, columns) of every weight, and (experts, rows, columns) of every stack of matrices, that is packed."""
    chosen = chosen_by(packing, model)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": matrix_shape(module) for name, module in chosen.packed.items()}
    shapes |= {f"{name}.weight": tuple(module.weight.shape) for name, module in chosen.tables.items()}
    return shapes | {name: tuple(stack.shape) for name, stack in chosen.stacks.items()}
