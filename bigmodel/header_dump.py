"""Tensors of a checkpoint that is not here, from a dump of its headers, checked before they are believed.

Three forms are understood: what `bigmodel inspect --json` prints, the header of a safetensors file, and plain
`{name: {"dtype": "bfloat16", "shape": [4096, 4096]}}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from .collecting import without_collecting
from .errors import CheckpointError, CheckpointNotFoundError
from .json_reading import parse_json
from .loading.formats.safetensors import DTYPES
from .protocols import TensorSpec

__all__ = ["read_dump", "specs_in"]

MAX_DIMENSIONS: Final = 64
"""torch has no tensors of more."""
MAX_ELEMENTS: Final = 1 << 62
_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)
}


def read_dump(file: Path) -> Any:
    """The JSON in `file`. Raises `CheckpointError`, naming the file, where it is none or holds a name twice."""
    try:
        with without_collecting():
            return parse_json(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{file}: there is no such file.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as a header dump ({type(error).__name__}: {str(error)[:200]}).") from error


def specs_in(dump: Any, source: str = "The header dump") -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in a dump of one of the three forms, in its order. `source` names it in errors.

    Raises `CheckpointError`, naming the tensor, for what is no dump, an unknown dtype, an impossible shape, and sizes in bytes that
    contradict dtype and shape.
    """
    tables = dump.get("tensors", dump) if isinstance(dump, Mapping) else None
    if isinstance(tables, Mapping) and "shape" in tables:  # a tensor that is called "tensors"
        tables = dump
    if not isinstance(tables, Mapping):
        raise CheckpointError(
            f"{source} is not one: it should be a JSON object of tensor names, each with 'dtype' and 'shape' (what "
            "`bigmodel inspect --json` prints, or the header of a safetensors file)."
        )
    if isinstance(tables.get("model_type"), str):
        raise CheckpointError(f"{source} is a configuration, and no header dump. Configurations are planned under the name config.json.")
    has_nbytes = (
        isinstance(dump.get("tensors"), Mapping) and dump.get("format") == "safetensors"
    )  # in other formats views take what they span
    known: dict[tuple[Any, ...], tuple[TensorSpec, int]] = {}
    specs: dict[str, TensorSpec] = {}
    with without_collecting():
        for name, table in tables.items():
            if name == "__metadata__":
                continue
            try:
                if isinstance(table, torch.Tensor):
                    raise TypeError("a tensor")
                key = (table["dtype"], *table["shape"])
                found = known.get(key)
                if found is None:
                    found = known[key] = _checked(key, table["shape"], name, source)
            except (TypeError, KeyError) as error:
                raise CheckpointError(f"{source}: {str(name)[:100]!r} lacks a 'dtype' and a 'shape' (a list of sizes).") from error
            specs[name] = found[0]
            if "data_offsets" in table or has_nbytes:
                _check_bytes(table, found[1], name, source)
    if not specs:
        raise CheckpointError(f"{source}: holds no tensors.")
    return specs


def _checked(key: tuple[Any, ...], shape: Any, name: Any, source: str) -> tuple[TensorSpec, int]:
    """The spec, and its bytes."""
    dtype_name, *sizes = key
    if not isinstance(name, str) or not name or any(not part for part in name.split(".")):
        raise CheckpointError(f"{source}: {str(name)[:100]!r} is no name of a tensor.")
    if not isinstance(dtype_name, str) or (dtype := _dtype(dtype_name)) is None:
        raise CheckpointError(
            f"{source}: {name!r} has the unknown dtype {str(dtype_name)[:40]!r}; known are {', '.join(DTYPES)}, or torch's."
        )
    fits = isinstance(shape, list | tuple) and len(sizes) <= MAX_DIMENSIONS and all(type(size) is int and size >= 0 for size in sizes)
    if not fits or math.prod(sizes) > MAX_ELEMENTS:
        raise CheckpointError(f"{source}: {name!r} has an impossible shape {str(shape)[:100]}.")
    return TensorSpec(tuple(sizes), dtype), math.prod(sizes) * dtype.itemsize


def _dtype(name: str) -> torch.dtype | None:
    return DTYPES.get(name) or _TORCH_DTYPES.get(name.removeprefix("torch."))


def _check_bytes(table: Mapping[str, Any], needed: int, name: str, source: str) -> None:
    try:
        begin, end = table["data_offsets"] if "data_offsets" in table else (0, table["nbytes"])
        said = end - begin
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{source}: {name!r} has impossible 'data_offsets' or 'nbytes'.") from error
    if said != needed or begin < 0:
        raise CheckpointError(f"{source}: {name!r} of shape {table['shape']} and dtype {table['dtype']} needs {needed} bytes, not {said}.")
