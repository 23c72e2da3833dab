"""The header of a safetensors file, checked as if a stranger had written it.

Format: https://huggingface.co/docs/safetensors — eight bytes (length of the header, little endian), the header (JSON), then the tensors'
bytes without holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import CheckpointError
from ...protocols import TensorSpec
from ..entry import Entry, is_possible_shape
from ..json_text import parse_object
from ..location import CheckpointFile
from .header import START_BYTES, Header, foreign, read_local

__all__ = ["SafetensorsFormat", "lay_out"]

LENGTH_BYTES: Final = 8
"""Of the number before the header: the header's own length."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
MAX_DIMENSIONS: Final = 64
"""torch has no tensors of more."""

DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F4": "float4_e2m1fn_x2",
    }.items()
    if hasattr(torch, attribute)
}
DTYPE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}
"""torch dtype → its name in a safetensors header."""
PAIRS: Final = "F4"
"""Two of its numbers are an element of torch's, and a byte; headers count the numbers, torch the pairs, along the last dimension."""


def lay_out(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file (length and header), and where in the file each tensor's bytes begin, in the order of the file.

    The widest dtypes come first, so that every tensor is aligned to its own. Raises `CheckpointError` for a dtype that the format lacks.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ordered = sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    position = 0
    for name, spec in ordered:
        if spec.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name!r} is {spec.dtype}, which safetensors cannot hold; use safe_serialization=False.")
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        shape = list(spec.shape)
        if DTYPE_NAMES[spec.dtype] == PAIRS:
            if not shape:
                raise CheckpointError(f"{name!r} is {spec.dtype} without dimensions, which safetensors cannot hold.")
            shape[-1] *= 2
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, {name: len(beginning) + header[name]["data_offsets"][0] for name, _ in ordered}


class SafetensorsFormat:
    """safetensors."""

    name = "safetensors"
    suffixes = (".safetensors",)
    usual_names = ("model", "diffusion_pytorch_model", "adapter_model")

    def read_header(self, file: Path) -> Header:
        """Entries in file order, and the file's own metadata.

        Raises `CheckpointError` on a damaged header and on a file that is shorter or longer than its header says (with both sizes).
        """
        return read_local(file, self.header_from)

    def header_from(self, file: CheckpointFile, size_bytes: int, read: Callable[[int, int], bytes]) -> Header:
        """See `RangedFormat` and `read_header`."""
        start = read(0, LENGTH_BYTES)
        if len(start) < LENGTH_BYTES:
            raise CheckpointError(f"{file}: expected at least 8 bytes, found {len(start)}; the file is empty or truncated.")
        header_bytes = int.from_bytes(start, "little")
        if header_bytes > MAX_HEADER_BYTES:
            if (found := foreign(read(0, START_BYTES))) is not None:
                raise CheckpointError(f"{file}: {found}")
            raise CheckpointError(
                f"{file}: its header claims {header_bytes} bytes, more than the {MAX_HEADER_BYTES} that safetensors allows; "
                "this is no safetensors file, or a damaged one."
            )
        data_start = LENGTH_BYTES + header_bytes
        if data_start > size_bytes:
            raise CheckpointError(
                f"{file}: truncated within its header: expected at least {data_start} bytes, found {size_bytes}. Get it again."
            )
        table = parse_object(read(LENGTH_BYTES, data_start), file, "its header")
        metadata = _metadata(table.pop("__metadata__", None), file)
        entries = sorted((_entry(name, value, data_start, file) for name, value in table.items()), key=_place)
        _check_layout(entries, data_start, size_bytes, file)
        return Header(tuple(entries), metadata)


def _place(entry: Entry) -> tuple[int, int]:
    return entry.offset, entry.nbytes


def _metadata(found: Any, file: CheckpointFile) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{file}: '__metadata__' in its header is not an object of strings.")
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, value: Any, data_start: int, file: CheckpointFile) -> Entry:
    try:
        dtype_name, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: the header of {name!r} lacks 'dtype', 'shape' or two 'data_offsets'.") from error
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{file}: {name!r} has the unknown dtype {str(dtype_name)[:40]!r}; known are {', '.join(DTYPES)}.")
    is_list = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(_is_size(size) for size in shape)
    if not is_list or not is_possible_shape(shape):
        raise CheckpointError(f"{file}: {name!r} has an impossible shape {str(shape)[:100]}.")
    if not _is_size(begin) or not _is_size(end) or begin > end:
        raise CheckpointError(f"{file}: {name!r} has impossible offsets [{str(begin)[:40]}, {str(end)[:40]}].")
    dtype = DTYPES[dtype_name]
    if dtype_name == PAIRS:
        if not shape or shape[-1] % 2:
            raise CheckpointError(
                f"{file}: {name!r} has the shape {shape}, whose last dimension should be even: two {dtype_name} are a byte."
            )
        shape = [*shape[:-1], shape[-1] // 2]
    needed = math.prod(shape) * dtype.itemsize
    if needed != end - begin:
        raise CheckpointError(
            f"{file}: {name!r} of shape {shape} and dtype {dtype_name} needs {needed} bytes; its offsets hold {end - begin}."
        )
    return Entry(name, file, data_start + begin, end - begin, dtype, tuple(shape))


def _check_layout(entries: list[Entry], data_start: int, size_bytes: int, file: CheckpointFile) -> None:
    position = data_start
    previous = "the header"
    for entry in entries:
        if entry.offset < position:
            raise CheckpointError(f"{file}: the bytes of {previous!r} and {entry.name!r} overlap ({position - entry.offset} bytes).")
        if entry.offset > position:
            raise CheckpointError(f"{file}: {entry.offset - position} bytes between {previous!r} and {entry.name!r} belong to no tensor.")
        position = entry.offset + entry.nbytes
        previous = entry.name
    if position > size_bytes:
        raise CheckpointError(f"{file}: truncated: expected {position} bytes, found {size_bytes}. Get it again.")
    if position < size_bytes:
        raise CheckpointError(
            f"{file}: expected {position} bytes, found {size_bytes}; {size_bytes - position} at the end belong to no tensor."
        )
