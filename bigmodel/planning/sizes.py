"""Bytes: of size strings, dtypes, tensors and modules. What is planned here is what loading allocates."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import nn

from ..collecting import without_collecting
from ..constants import GiB, KiB, MiB
from ..errors import PlanError
from ..modules import class_names
from ..text import kind_text

__all__ = [
    "CustomDtype",
    "TensorBytes",
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "get_max_layer_size",
    "get_module_leaves",
    "tensor_bytes_rule",
]


class CustomDtype(Enum):
    """Number formats that torch has no dtype for, as `special_dtypes` and `dtype` may name them."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


DtypeLike: TypeAlias = torch.dtype | CustomDtype | str
TensorBytes: TypeAlias = Callable[[str, torch.Tensor], int]
"""Bytes that the tensor of this full name will take once it is loaded."""

_UNIT_BYTES = {"GIB": GiB, "MIB": MiB, "KIB": KiB, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d*)?(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?)\s*(?P<unit>[GMK]i?B)\s*", re.IGNORECASE)
_PLAIN = (nn.Parameter, torch.Tensor)
_CUSTOM_BITS = {CustomDtype.FP8: 8, CustomDtype.INT4: 4, CustomDtype.INT2: 2}


class _SizeTypeError(PlanError, AttributeError):
    """A size that is neither a number of bytes nor a string; an AttributeError for the scripts that expect one."""


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as `"20GiB"` (binary), `"20GB"` (decimal) or `"20Gb"` (decimal bits: the last letter is a small b).

    An int is bytes already. Raises `PlanError` (a ValueError) for a negative or unparsable size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise PlanError(f"Size {size} is negative. Give bytes as an int >= 0, or a string such as '20GiB'.")
        return size
    if not isinstance(size, str):
        raise _SizeTypeError(f"Size {size!r} is {kind_text(size)}. Give bytes as an int, or a string such as '20GiB'.")
    match = _SIZE.fullmatch(size)
    if match is None:
        raise PlanError(f"Size {size!r} is not understood. Use a number >= 0 and one of GiB, MiB, KiB, GB, MB, KB, for example '20GiB'.")
    unit, number = match["unit"], float(match["number"])
    if math.isinf(number * _UNIT_BYTES[unit.upper()]):
        raise PlanError(f"Size {size[:40]!r} is more than a number can hold. Leave a device without a limit out, or give what it has.")
    total_bytes = int(number * _UNIT_BYTES[unit.upper()])
    is_bits = unit.endswith("b") and "i" not in unit.lower()
    return total_bytes // 8 if is_bits else total_bytes


def as_dtype(dtype: object) -> torch.dtype | CustomDtype:
    if isinstance(dtype, torch.dtype | CustomDtype):
        return dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        for custom in CustomDtype:
            if dtype.lower() == custom.value:
                return custom
    raise PlanError(f"{dtype!r} is not a dtype. Use a torch dtype, its name such as 'float16', or a CustomDtype.")


def _element_bits(dtype: DtypeLike) -> int:
    known = as_dtype(dtype)
    return _CUSTOM_BITS[known] if isinstance(known, CustomDtype) else 8 * known.itemsize


def dtype_byte_size(dtype: DtypeLike) -> int | float:
    """Bytes of one stored element of `dtype`; a fraction for the formats that pack several into a byte (`CustomDtype.INT4`: 0.5).

    torch stores a bool, and each of its sub-byte dtypes (`int1`, `float4_e2m1fn_x2`, …), in one byte per element.
    Raises `PlanError` for what is no dtype.
    """
    bits = _element_bits(dtype)
    return bits / 8 if bits % 8 else bits // 8


def tensor_bytes_rule(
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    packed_sizes: Mapping[str, int] | None = None,
) -> TensorBytes:
    """How many bytes each tensor takes once loaded with `dtype`: what loading converts is counted converted, up or down.

    `packed_sizes[name]` (bytes, of a `WeightFormat`) wins over `special_dtypes[name]`, and that over `dtype`. Only floating tensors are
    converted: integers, bools and complex numbers keep their own size. Packed formats fill whole bytes, tensor by tensor. Raises
    `PlanError` for what is no dtype, or a lazy tensor without a shape.
    """
    common_bits = None if dtype is None else _element_bits(dtype)
    special_bits = {name: _element_bits(special) for name, special in (special_dtypes or {}).items()}
    packed = packed_sizes or {}

    def as_it_is(name: str, tensor: torch.Tensor) -> int:
        if type(tensor) not in _PLAIN:
            _refuse_lazy(name, tensor)
        return tensor.numel() * tensor.element_size()

    def rule(name: str, tensor: torch.Tensor) -> int:
        if type(tensor) not in _PLAIN:
            _refuse_lazy(name, tensor)
        if name in packed:
            return packed[name]
        bits = special_bits.get(name)
        if bits is None and common_bits is not None and tensor.is_floating_point():
            bits = common_bits
        if bits is None:
            bits = 8 * tensor.element_size()
        return -(-tensor.numel() * bits // 8)

    return as_it_is if common_bits is None and not special_bits and not packed else rule


def _refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise PlanError(f"Tensor {name!r} has no shape yet (lazy module). Run one forward, then plan.")


@without_collecting()
def compute_module_sizes(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Bytes of every module and tensor below `model`, by full name, `""` for all of it. A tied tensor counts once, under its first name.

    Parameters stand before all buffers, and modules before what is in them.
    `dtype` and `special_dtypes` as in `tensor_bytes_rule`. With `buffers_only` parameters are left out.
    """
    rule = tensor_bytes_rule(dtype, special_dtypes)
    sizes: defaultdict[str, int] = defaultdict(int)
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, buffers: bool) -> int | None:
        """Adds the parameters, or the buffers, below `module`. Returns their bytes, or None if all were counted before."""
        is_new = path not in sizes
        if is_new:
            sizes[path] = 0
        prefix = f"{path}." if path else ""
        total_bytes, found = 0, False
        for key, tensor in (module._buffers if buffers else module._parameters).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                name = prefix + key
                sizes[name] = nbytes = rule(name, tensor)
                total_bytes += nbytes
                found = True
        for key, child in module._modules.items():
            below = None if child is None else visit(child, prefix + key, buffers)
            if below is not None:
                total_bytes += below
                found = True
        if found:
            sizes[path] += total_bytes
        elif path and is_new:
            del sizes[path]
        return total_bytes if found else None

    for buffers in (True,) if buffers_only else (False, True):
        visit(model, "", buffers)
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: DtypeLike | None = None, special_dtypes: Mapping[str, DtypeLike] | None = None
) -> int:
    """Bytes of all buffers of `model`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Collection[str] | None,
) -> tuple[int, list[str]]:
    """The size of the biggest layer among `modules` (name, module or tensor) and the names of all layers of that size, in order.

    A layer is a module without children, a module of a no-split class, or a single tensor.
    """
    classes = class_names(no_split_module_classes)
    largest_bytes, names = 0, list[str]()
    queue = list(reversed(modules))
    while queue:
        name, module = queue.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in classes:
            own = list(module.named_parameters(recurse=False))
            queue += [(f"{name}.{key}" if name else key, part) for key, part in reversed(own + children)]
            continue
        nbytes = module_sizes.get(name, 0)
        if nbytes > largest_bytes:
            largest_bytes, names = nbytes, [name]
        elif nbytes == largest_bytes:
            names.append(name)
    return largest_bytes, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and its biggest layer with the names of all layers of that size (see `get_max_layer_size`)."""
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, Any]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None) or [])


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """The names that are not `""` and no other name's parent, in order."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]
