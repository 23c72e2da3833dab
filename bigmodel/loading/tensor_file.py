"""A safetensors file whose tensors are written one by one, in any order: its header says beforehand where each will be."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

import torch

from ..protocols import TensorSpec
from .checksum import checksum, noted, room_for
from .formats.safetensors import lay_out

__all__ = ["TensorFile", "byte_parts"]

WRITE_BYTES: Final = 16 << 20


def byte_parts(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor on any device, row-major, in parts that fit the staging memory."""
    flat = tensor.detach().contiguous().reshape(-1)
    step = max(1, WRITE_BYTES // tensor.dtype.itemsize)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].to("cpu").view(torch.uint8).numpy().data


class TensorFile:
    """Writes tensors of known shapes and dtypes to a stream (unbuffered, seekable), and their checksums into its header."""

    def __init__(self, stream: BinaryIO, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        self._descriptor = stream.fileno()
        self._specs, self._metadata = specs, metadata
        self._checksums: dict[str, str] = {}
        beginning, self._offsets = lay_out(specs, {**metadata, **room_for(specs)})
        self._write(beginning, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the bytes of `name`. Raises KeyError for a name that the header lacks."""
        offset = self._offsets[name]
        self._checksums[name] = checksum(tensor)
        for part in byte_parts(tensor):
            self._write(part, offset)
            offset += part.nbytes

    def finish(self) -> None:
        """Notes the checksums of the tensors, all of which have been written."""
        self._write(lay_out(self._specs, {**self._metadata, **noted(self._checksums)})[0], 0)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data).cast("B")
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
