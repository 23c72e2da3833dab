"""The contents of a file written by `torch.save`: names, shapes and strides by torch's own safe unpickler, offsets from the zip directory.

Since torch 1.6 such a file is a zip archive without compression: `data.pkl` and one record `data/<key>` for the bytes of each storage
(https://docs.pytorch.org/docs/stable/notes/serialization.html). Nothing of the storages is read here: the file is mapped.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import CheckpointError, CheckpointNotFoundError
from ...text import kind_text
from ..entry import Entry, span_elements
from .header import START_BYTES, Header, foreign

__all__ = ["TorchZipFormat"]

ZIP_MAGIC: Final = b"PK"
LOCAL_HEADER_BYTES: Final = 30
PAGE_BYTES: Final = 4096
SHORT_BYTES: Final = 64
"""Of a record that holds a word."""


class TorchZipFormat:
    """torch.save's zip archives, read with `weights_only` always."""

    name = "torch"
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    usual_names = ("pytorch_model", "model", "diffusion_pytorch_model", "adapter_model")

    def read_header(self, file: Path) -> Header:
        """Entries of the state dict in `file`, with the place of their bytes inside the archive.

        Raises `CheckpointError` for a truncated or compressed archive, for one that holds more than plain tensors need, for a file of
        torch before 1.6 (it says how to convert it), and for sparse or quantized tensors.
        """
        records = _records(file)
        storages: list[torch.UntypedStorage] = []

        def remember(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            storages.append(storage)
            return storage

        try:
            content = torch.load(str(file), map_location=remember, mmap=True, weights_only=True)  # type: ignore[arg-type]
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{file}: holds more than tensors and plain containers, and is not unpickled since that could run foreign code. "
                f"Ask its author for safetensors. ({_first_line(error)})"
            ) from error
        # What a damaged archive makes torch stumble over can be anything.
        except Exception as error:
            raise CheckpointError(f"{file}: damaged: torch cannot read its contents ({_first_line(error)}).") from error
        tensors = _tensors(content, file)
        base = _base_address(storages, records, file)
        return Header(tuple(_entry(name, tensor, base, file) for name, tensor in tensors.items()))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


@dataclass(frozen=True, slots=True)
class _Record:
    offset: int
    nbytes: int


def _records(file: Path) -> list[_Record]:
    """The data records of the archive, in file order."""
    try:
        with open(file, "rb") as stream:
            size_bytes = stream.seek(0, 2)
            stream.seek(0)
            start = stream.read(START_BYTES)
            if not start.startswith(ZIP_MAGIC):
                if not size_bytes:
                    raise CheckpointError(f"{file}: the file is empty. Get it again.")
                if (found := foreign(start)) is not None:
                    raise CheckpointError(f"{file}: {found}")
                raise CheckpointError(
                    f"{file}: not an archive of torch 1.6 or later. If torch can read it, convert it once: "
                    f"torch.save(torch.load({str(file)!r}, weights_only=True), {str(file)!r})."
                )
            try:
                archive = zipfile.ZipFile(stream)
            # struct.error and OverflowError among others
            except Exception as error:
                raise CheckpointError(
                    f"{file}: truncated or damaged: no archive directory at the end of its {size_bytes} bytes. Get it again."
                ) from error
            records = []
            for info in archive.infolist():
                if not 0 <= info.header_offset < size_bytes:
                    raise _beyond(info, size_bytes, file)
                if info.filename.endswith("/byteorder") and _short_record(archive, info, file) != b"little":
                    raise CheckpointError(f"{file}: written on a big-endian machine; load and save it there with safetensors.")
                if "/data/" not in info.filename:
                    continue
                if info.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{file}: {info.filename!r} is compressed; torch.save never does that.")
                stream.seek(info.header_offset)
                local = stream.read(LOCAL_HEADER_BYTES)
                if len(local) < LOCAL_HEADER_BYTES:
                    raise _beyond(info, size_bytes, file)
                name_bytes, extra_bytes = struct.unpack("<HH", local[26:30])
                offset = info.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
                if offset + info.file_size > size_bytes:
                    raise CheckpointError(
                        f"{file}: truncated: expected at least {offset + info.file_size} bytes for {info.filename!r}, found {size_bytes}."
                    )
                records.append(_Record(offset, info.file_size))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{file}: there is no such file.") from error
    # RuntimeError: a record that is said to be encrypted.
    except (zipfile.BadZipFile, UnicodeDecodeError, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{file}: damaged archive: {error}.") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}.") from error
    return sorted(records, key=lambda record: record.offset)


def _beyond(info: zipfile.ZipInfo, size_bytes: int, file: Path) -> CheckpointError:
    return CheckpointError(f"{file}: truncated: {info.filename!r} is said to begin at byte {info.header_offset} of {size_bytes}.")


def _short_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: Path) -> bytes:
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > SHORT_BYTES:
        raise CheckpointError(f"{file}: {info.filename!r} is compressed or too long; torch.save never does that.")
    return archive.read(info)


def _tensors(content: Any, file: Path) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds {kind_text(content)}, not a state dict (names → tensors).")
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if not tensors and content:
        inner = [name for name, value in content.items() if isinstance(value, Mapping) and any(map(torch.is_tensor, value.values()))]
        hint = f" Its item {inner[0]!r} is one: save that alone." if inner else ""
        raise CheckpointError(f"{file}: holds no tensors at its top level, so it is no state dict.{hint}")
    return tensors


def _base_address(storages: list[torch.UntypedStorage], records: list[_Record], file: Path) -> int:
    """The address at which torch has mapped the file: the one at which every storage lies on a record of at least its size.

    torch does not tell which record a storage is. The mapping keeps distances, so the addresses tell.
    """
    found = sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes() > 0})
    if not found:
        return 0
    sizes = {record.offset: record.nbytes for record in records}
    bases = [
        base
        for record in records
        if (base := found[0][0] - record.offset) % PAGE_BYTES == 0
        and all(sizes.get(address - base, -1) >= nbytes for address, nbytes in found)
    ]
    if len(bases) != 1:
        raise CheckpointError(f"{file}: damaged: its storages do not lie on the archive's records.")
    return bases[0]


def _entry(name: str, tensor: torch.Tensor, base: int, file: Path) -> Entry:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(f"{file}: {name!r} is a sparse, quantized or lazily conjugated tensor; save it as a plain one.")
    shape = tuple(tensor.shape)
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    nbytes = span_elements(shape, tuple(tensor.stride())) * tensor.dtype.itemsize
    offset = tensor.data_ptr() - base if nbytes else 0
    return Entry(name, file, offset, nbytes, tensor.dtype, shape, strides)
