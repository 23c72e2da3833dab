"""The header of a GGUF file, checked as if a stranger had written it; quantized tensors are unpacked by the package `gguf`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md — magic, version and counts, key-value pairs, tensor infos, then the
tensors' bytes, each at a multiple of the alignment. Dimensions stand in ggml's order, the reverse of torch's.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import CheckpointError, MissingPackageError
from ..entry import Entry, Packed, is_possible_shape
from ..location import CheckpointFile
from .header import START_BYTES, Header, foreign, read_local

__all__ = ["GgufFormat"]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 1 << 28
MAX_NAME_BYTES: Final = 1 << 16
MAX_STRINGS: Final = 1 << 22
"""Of one array: four times the largest vocabulary."""
MAX_DIMENSIONS: Final = 4
MAX_DEPTH: Final = 4
"""Of arrays within arrays."""
METADATA_CHARACTERS: Final = 1000
"""Longer values (chat templates, vocabularies) are left out of the metadata."""
WINDOW_BYTES: Final = 1 << 20
"""Read at once."""

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}
"""Key-value types of one number: how it is packed."""
PLAIN: Final = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
"""Tensor types whose bytes are the elements."""


class GgufFormat:
    """GGUF, as llama.cpp writes it."""

    name = "gguf"
    suffixes = (".gguf",)
    usual_names = ("model",)

    def read_header(self, file: Path) -> Header:
        """Entries in file order, under the names in the file, and those key-value pairs that are short.

        Quantized tensors are entries of dtype float32 that are unpacked as they are read. Raises `CheckpointError` for a damaged or
        truncated file and for types that cannot be unpacked, `MissingPackageError` for quantized tensors without the package gguf.
        """
        return read_local(file, self.header_from)

    def header_from(self, file: CheckpointFile, size_bytes: int, read: Callable[[int, int], bytes]) -> Header:
        """See `RangedFormat` and `read_header`."""
        cursor = _Cursor(file, size_bytes, read)
        if cursor.take(4) != MAGIC:
            raise CheckpointError(f"{file}: {foreign(read(0, START_BYTES)) or 'does not begin like a GGUF file.'}")
        version = cursor.number("<I")
        if version not in VERSIONS:
            raise CheckpointError(f"{file}: GGUF version {version}, or written on a big-endian machine; known are {VERSIONS}.")
        tensor_count, pair_count = cursor.number("<Q"), cursor.number("<Q")
        metadata: dict[str, str] = {}
        alignment = 32
        for _ in range(pair_count):
            key = cursor.text(MAX_NAME_BYTES)
            if key in metadata:
                raise CheckpointError(f"{file}: its header holds {key!r} twice.")
            value = _value(cursor, cursor.number("<I"), 0)
            if key == "general.alignment":
                if type(value) is not int or value <= 0 or value & (value - 1) or value > WINDOW_BYTES:
                    raise CheckpointError(f"{file}: an impossible alignment {value!r}.")
                alignment = value
            metadata[key] = "" if value is None else str(value)
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name, shape, kind, offset = _info(cursor)
            if name in infos:
                raise CheckpointError(f"{file}: its header holds the tensor {name!r} twice.")
            infos[name] = shape, kind, offset
        data_start = -(-cursor.position // alignment) * alignment
        entries = sorted((_entry(file, name, data_start, *info) for name, info in infos.items()), key=lambda entry: entry.offset)
        _check_layout(entries, data_start, alignment, size_bytes, file)
        return Header(tuple(entries), {key: value for key, value in metadata.items() if 0 < len(value) <= METADATA_CHARACTERS})


class _Cursor:
    """Goes through the header, never past the end of the file."""

    def __init__(self, file: CheckpointFile, size_bytes: int, read: Callable[[int, int], bytes]) -> None:
        self.file = file
        self.position = 0
        self._size_bytes = min(size_bytes, MAX_HEADER_BYTES)
        self._read = read
        self._window = b""
        self._window_start = 0

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        self._check(nbytes)
        first = self.position - self._window_start
        if first + nbytes > len(self._window) or first < 0:
            self._window_start, first = self.position, 0
            self._window = self._read(self.position, min(self.position + max(nbytes, WINDOW_BYTES), self._size_bytes))
        self.position += nbytes
        return self._window[first : first + nbytes]

    def skip(self, nbytes: int) -> None:
        """Passes over bytes."""
        self._check(nbytes)
        self.position += nbytes

    def number(self, packed: str) -> Any:
        """The next number."""
        (value,) = struct.unpack(packed, self.take(struct.calcsize(packed)))
        return value

    def text(self, most_bytes: int) -> str:
        """The next string, of which no more than `most_bytes` may be there."""
        length = self.number("<Q")
        if length > most_bytes:
            raise CheckpointError(f"{self.file}: damaged: a string of {length} bytes at byte {self.position} of its header.")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file}: damaged: no text at byte {self.position} of its header.") from error

    def _check(self, nbytes: int) -> None:
        if self.position + nbytes > self._size_bytes:
            raise CheckpointError(
                f"{self.file}: truncated or damaged: its header goes to byte {self.position + nbytes}, but ends by {self._size_bytes}."
            )


def _value(cursor: _Cursor, kind: int, depth: int) -> str | int | float | None:
    """The value of a pair; None for arrays and long strings, which are passed over."""
    if kind in NUMBERS:
        number: int | float = cursor.number(NUMBERS[kind])
        return number
    if kind == STRING:
        length = cursor.number("<Q")
        if length > METADATA_CHARACTERS:
            cursor.skip(length)
            return None
        return cursor.take(length).decode("utf-8", errors="replace")
    if kind != ARRAY or depth >= MAX_DEPTH:
        raise CheckpointError(f"{cursor.file}: damaged: a value of the unknown type {kind} at byte {cursor.position} of its header.")
    inner, count = cursor.number("<I"), cursor.number("<Q")
    if inner in NUMBERS:
        cursor.skip(count * struct.calcsize(NUMBERS[inner]))
        return None
    if count > MAX_STRINGS:
        raise CheckpointError(
            f"{cursor.file}: an array of {count} values at byte {cursor.position} of its header is more than any model has."
        )
    for _ in range(count):
        if inner == STRING:
            cursor.skip(cursor.number("<Q"))
        else:
            _value(cursor, inner, depth + 1)
    return None


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (torch's order), type and offset of the next tensor."""
    name = cursor.text(MAX_NAME_BYTES)
    dimensions = cursor.number("<I")
    if dimensions > MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.file}: {name!r} has {dimensions} dimensions; GGUF knows up to {MAX_DIMENSIONS}.")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    if not is_possible_shape(shape):
        raise CheckpointError(f"{cursor.file}: {name!r} has an impossible shape {list(shape)}.")
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _entry(file: CheckpointFile, name: str, data_start: int, shape: tuple[int, ...], kind: int, offset: int) -> Entry:
    if kind in PLAIN:
        dtype = PLAIN[kind]
        return Entry(name, file, data_start + offset, math.prod(shape) * dtype.itemsize, dtype, shape)
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise MissingPackageError(
            f"{file}: {name!r} is quantized; unpacking it needs the package gguf: pip install 'bigmodel[gguf]'."
        ) from error
    try:
        found = gguf.GGMLQuantizationType(kind)
        elements, nbytes = gguf.GGML_QUANT_SIZES[found]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: {name!r} has the type {kind}, which the package gguf does not know.") from error
    if not shape or shape[-1] % elements:
        raise CheckpointError(f"{file}: {name!r} of shape {list(shape)} cannot be {found.name}: rows are not whole blocks of {elements}.")
    unpack = partial(_unpack, kind)
    try:
        unpack(torch.zeros(1, nbytes, dtype=torch.uint8))
    except NotImplementedError as error:
        raise CheckpointError(f"{file}: {name!r} is {found.name}, which the package gguf cannot unpack.") from error
    row_bytes = shape[-1] // elements * nbytes
    total_bytes = math.prod(shape[:-1]) * row_bytes
    return Entry(name, file, data_start + offset, total_bytes, torch.float32, shape, contents=Packed(found.name, row_bytes, unpack))


def _unpack(kind: int, rows: torch.Tensor) -> torch.Tensor:
    """float32 rows of packed ones (uint8)."""
    gguf = importlib.import_module("gguf")
    unpacked: torch.Tensor = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind)))
    return unpacked


def _check_layout(entries: list[Entry], data_start: int, alignment: int, size_bytes: int, file: CheckpointFile) -> None:
    position = data_start
    previous = "the header"
    for entry in entries:
        if entry.offset != position:
            what = "overlap" if entry.offset < position else "leave a hole"
            raise CheckpointError(f"{file}: {previous!r} and {entry.name!r} {what}: expected at byte {position}, found {entry.offset}.")
        end = entry.offset + entry.nbytes
        if end > size_bytes:
            raise CheckpointError(f"{file}: truncated: expected at least {end} bytes, found {size_bytes}. Get it again.")
        position = -(-end // alignment) * alignment
        previous = entry.name
    if size_bytes > position:
        raise CheckpointError(f"{file}: expected at most {position} bytes, found {size_bytes}; the rest belongs to no tensor.")
