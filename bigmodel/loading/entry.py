"""One tensor in a checkpoint: which bytes of which file, and how they are to be read."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..errors import CheckpointError, CheckpointNotFoundError
from .location import CheckpointFile

__all__ = [
    "Box",
    "Dequantized",
    "Entry",
    "FileIdentity",
    "Packed",
    "Scaled",
    "Sharded",
    "Turned",
    "contiguous_strides",
    "is_possible_shape",
    "refuse_stream",
    "span_elements",
]


MOST_ELEMENTS: Final = 1 << 59
"""Of a tensor: those of which torch can still count the bytes, 16 each at most, in 63 bits."""


def is_possible_shape(shape: Iterable[int]) -> bool:
    """Whether torch can have such a tensor. The strides of an empty one, too, must be numbers that it can count."""
    return math.prod(max(size, 1) for size in shape) <= MOST_ELEMENTS


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides (elements) of a row-major tensor of `shape`."""
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * max(shape[dimension + 1], 1)
    return tuple(strides)


def span_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one of a strided tensor, both included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def refuse_stream(mode: int, place: Path) -> None:
    """Raises `CheckpointError` for a pipe, socket or device, by its `st_mode`: there is no going back in them, and opening one may wait."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kind = kinds.get(stat.S_IFMT(mode))
    if kind is not None:
        raise CheckpointError(f"{place}: is {kind}, not a file. Weights are read from any place of a file: write them into one first.")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells whether a file is still the one that was read: changed contents move at least one of these."""

    size_bytes: int
    modified_ns: int
    inode: int
    etag: str = ""
    """What a server calls this state of the file; empty where it does not, and for local files."""

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """The identity of a path or an open descriptor. Raises `CheckpointNotFoundError`, and `CheckpointError` for a path to no file."""
        try:
            found = os.stat(file)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{file}: there is no such file.") from error
        if isinstance(file, Path):  # who opened it has seen to that
            refuse_stream(found.st_mode, file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)

    def check(self, now: FileIdentity, file: CheckpointFile) -> None:
        """Raises `CheckpointError` when `now` differs, naming the file and what differs."""
        if self == now:
            return
        if self.size_bytes != now.size_bytes:
            change = f"it had {self.size_bytes} bytes and has {now.size_bytes} now"
        elif self.inode != now.inode:
            change = "another file has taken its place"
        elif self.etag != now.etag:
            change = f"its ETag or time of writing was {self.etag} and is {now.etag}"
        else:
            change = "it was written to"
        raise CheckpointError(f"{file}: the file has changed since it was opened ({change}). Load the model again.")


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor that lies in parts: the first index of each in the tensor, and its bytes."""

    parts: tuple[tuple[tuple[int, ...], Entry], ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor whose bytes have to be unpacked, row by row, each row (the last dimension) by itself."""

    name: str
    """Of the way of packing: `"Q4_K"`."""
    row_bytes: int
    """Bytes of one row."""
    unpack: Callable[[torch.Tensor], torch.Tensor]
    """Makes rows (n, elements), of the entry's dtype, of their bytes (n, `row_bytes`), uint8."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A tensor of 8-bit values, each of which is multiplied with the scale of its block."""

    values: Entry
    scales: Entry
    blocks: tuple[int, ...]
    """Elements of each dimension that share a scale."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size in each dimension of a part of a tensor."""


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A tensor that is made box by box of boxes of other entries. A way of packing is a subclass, in a file of its own."""

    told: str
    """What was taken for what, for messages: "weight_packed as 4-bit integers"."""

    def boxes(self, at_once_bytes: int) -> Iterator[Box]:
        """Boxes that together make the tensor, each of about `at_once_bytes` as float32."""
        raise NotImplementedError

    def inputs(self, box: Box) -> tuple[tuple[Entry, Box], ...]:
        """What a box is made of."""
        raise NotImplementedError

    def values(self, box: Box, inputs: list[torch.Tensor]) -> torch.Tensor:
        """A box, float32, of its inputs. Raises `CheckpointError` for inputs that contradict what was taken for granted."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Turned:
    """A tensor that lies in the file with its last two dimensions swapped."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a checkpoint."""

    name: str
    file: CheckpointFile
    offset: int
    """Bytes from the start of the file to the first element."""
    nbytes: int
    """Bytes from the first element to the end of the last one."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Elements between neighbours in each dimension; None for a contiguous tensor."""
    contents: Sharded | Packed | Scaled | Turned | Dequantized | None = None
    """What the tensor is made of, where it is not one plain range: `offset` and `strides` mean nothing then."""

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements, also where the tensor is contiguous."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Box:
        """All of the tensor."""
        return (0,) * len(self.shape), self.shape

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the elements, in order."""
        return self.contents is None and self.strides is None
