"""What an archive of `torch.save` holds, found without its weights, wherever it lies.

Since torch 1.6 it is a zip archive without compression: the pickle `data.pkl`, and one record `data/<key>` for the bytes of each storage
(https://docs.pytorch.org/docs/stable/notes/serialization.html). The directory at its end says where records are, torch's own safe
unpickler says what tensors they make.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import _weights_only_unpickler

from ...errors import CheckpointError
from ..entry import Entry, span_elements
from ..location import CheckpointFile
from .nested_tuples import refuse_endless_tuples

__all__ = ["TorchArchive"]

LOCAL_HEADER_BYTES: Final = 30
"""Of what stands before a record, beside its name and padding."""
LONGEST_PADDING_BYTES: Final = 0xFFFF
ALIGNMENT: Final = 64
"""Of records that torch writes (bytes from the start of the archive)."""
PADDING_MARK: Final = b"FB"
"""What torch's padding before a record begins with."""
DESCRIPTOR_FLAG: Final = 0x08
DESCRIPTOR_BYTES: Final = (16, 24, 12, 20)
"""Of what may stand behind a record with that flag: with or without a signature, sizes of 32 or 64 bits."""
ENCRYPTED_FLAG: Final = 0x01
UTF8_FLAG: Final = 0x800
MAX_DIRECTORY_BYTES: Final = 1 << 28
"""Of the directory and of the pickle, each. Those of a million tensors take half of it."""
SHORT_BYTES: Final = 64
"""Of a record that holds a word."""

Read = Callable[[int, int], bytes]


class TorchArchive:
    """The archive that makes up the `size_bytes` of `file` that `read` gives, by first byte and the byte behind the last. The last
    `end_bytes` of it are asked for at once.

    Raises `CheckpointError` for one that is truncated, damaged or compressed, that holds more than plain tensors and containers need, or
    that a big-endian machine has written.
    """

    def __init__(self, file: CheckpointFile, size_bytes: int, read: Read, end_bytes: int) -> None:
        self._file = file
        self._read = read
        self._directory = _directory(file, size_bytes, read, end_bytes)
        self._root = self._root_folder()
        self._is_padded = self._torch_wrote_it()
        self._held_bytes: dict[int, int] = {}
        """Of storages, by their first byte."""
        order = self._record("byteorder", SHORT_BYTES) if f"{self._root}/byteorder" in self._directory else b"little"
        if order.decode("latin-1") != sys.byteorder:
            raise CheckpointError(f"{file}: written on a machine of another byte order; load and save it there with safetensors.")
        self.content = self._unpickled(self._record("data.pkl", MAX_DIRECTORY_BYTES))
        """What was saved. Its tensors are on meta."""

    def entry(self, name: str, tensor: torch.Tensor) -> Entry:
        """Where the bytes of a tensor of the contents lie.

        Raises `CheckpointError` for one that is sparse, quantized or lazily conjugated, or has its bytes elsewhere.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise CheckpointError(f"{self._file}: {name!r} is a sparse, quantized or lazily conjugated tensor; save it as a plain one.")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        nbytes = span_elements(shape, strides) * tensor.dtype.itemsize
        first = int(tensor.storage_offset()) * tensor.dtype.itemsize
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if nbytes else 0
        if start is None:
            raise CheckpointError(f"{self._file}: {name!r} has no bytes in the archive (a tensor on meta, or of a class of its own).")
        if nbytes and not 0 <= first <= first + nbytes <= self._held_bytes[start]:
            raise CheckpointError(
                f"{self._file}: damaged: {name!r} is said to have the bytes from {first} to {first + nbytes} of a storage of "
                f"{self._held_bytes[start]}."
            )
        offset = start + first if nbytes else 0
        return Entry(name, self._file, offset, nbytes, tensor.dtype, shape, None if tensor.is_contiguous() else strides)

    def _root_folder(self) -> str:
        roots = [name.removesuffix("/data.pkl") for name in self._directory if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise CheckpointError(f"{self._file}: a zip archive, but none of torch.save: it holds {len(roots)} times a data.pkl.")
        if f"{roots[0]}/constants.pkl" in self._directory:
            raise CheckpointError(f"{self._file}: a TorchScript archive, which holds code. Save its state_dict() with safetensors.")
        return roots[0]

    def _record(self, name: str, most_bytes: int) -> bytes:
        offset, nbytes = self._place(name)
        if nbytes > most_bytes:
            raise CheckpointError(f"{self._file}: {name!r} of {nbytes} bytes is too long; torch.save never writes such a one.")
        return self._read(offset, offset + nbytes)

    def _place(self, name: str) -> tuple[int, int]:
        """First byte and number of bytes of a record."""
        found = self._directory.get(f"{self._root}/{name}")
        if found is None:
            raise CheckpointError(f"{self._file}: damaged: its record {name!r} is missing.")
        info, end = found
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ENCRYPTED_FLAG:
            raise CheckpointError(f"{self._file}: {info.filename!r} is compressed or encrypted; torch.save never does that.")
        offset = _aligned_offset(info, end) if self._is_padded else None
        if offset is None:
            offset, _ = self._own_header(info)
        if info.compress_size != info.file_size or offset + info.file_size > end:
            raise CheckpointError(
                f"{self._file}: damaged: {info.filename!r} should hold {info.file_size} bytes from byte {offset} on, but what follows "
                f"begins at byte {end}."
            )
        return offset, info.file_size

    def _torch_wrote_it(self) -> bool:
        """Whether records lie where torch puts them; another program may have packed them anew, and torch reads that too."""
        info, end = self._directory[f"{self._root}/data.pkl"]
        offset, padding = self._own_header(info)
        return padding.startswith(PADDING_MARK) and offset == _aligned_offset(info, end)

    def _own_header(self, info: zipfile.ZipInfo) -> tuple[int, bytes]:
        """First byte of a record, and how its padding begins, by what stands before it."""
        start = info.header_offset
        name_bytes = len(_name(info))
        header = self._read(start, start + LOCAL_HEADER_BYTES + name_bytes + len(PADDING_MARK))
        if len(header) < LOCAL_HEADER_BYTES:
            raise CheckpointError(f"{self._file}: truncated at byte {start}. Get it again.")
        return start + LOCAL_HEADER_BYTES + sum(struct.unpack("<HH", header[26:30])), header[LOCAL_HEADER_BYTES + name_bytes :]

    def _unpickled(self, text: bytes) -> Any:
        unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(text), encoding="utf-8")
        storages: dict[str, torch.TypedStorage] = {}

        def storage_of(told: Any) -> torch.TypedStorage:
            kind, storage_type, key, _, count = told
            dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
            if kind != "storage" or not isinstance(key, str) or type(count) is not int:
                raise ValueError("something else in the place of a storage")
            if key not in storages:
                storages[key] = self._storage(key, dtype, count)
            return storages[key]

        unpickler.persistent_load = storage_of  # type: ignore[method-assign]
        try:
            refuse_endless_tuples(text)
            return unpickler.load()
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self._file}: holds more than tensors and plain containers, and is not unpickled since that could run foreign code. "
                f"Ask its author for safetensors. ({_first_line(error)})"
            ) from error
        except CheckpointError:
            raise
        # What a damaged pickle makes torch stumble over can be anything.
        except Exception as error:
            raise CheckpointError(f"{self._file}: damaged: torch cannot read its contents ({_first_line(error)}).") from error
        finally:
            # torch keeps sparse tensors there until it has looked at their values.
            torch._utils._sparse_tensors_to_validate.clear()

    def _storage(self, key: str, dtype: torch.dtype, count: int) -> torch.TypedStorage:
        """A storage without bytes, which knows where they are by the attribute that torch's own loading leaves on such."""
        offset, held_bytes = self._place(f"data/{key}")
        nbytes = count * dtype.itemsize
        if not 0 <= nbytes <= held_bytes:
            raise CheckpointError(
                f"{self._file}: damaged: its storage {key!r} is said to have {nbytes} bytes, its record has {held_bytes}."
            )
        storage = torch.UntypedStorage(nbytes, device="meta")
        storage._checkpoint_offset = offset
        self._held_bytes[offset] = nbytes
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


class _Seen(io.RawIOBase):
    """A file of which parts are read as they are asked for; what the end holds is asked for once."""

    def __init__(self, size_bytes: int, read: Read, end_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._position = 0
        self._read = read
        self._end_start = max(0, size_bytes - end_bytes)
        self._end = read(self._end_start, size_bytes)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if position < 0:
            raise OSError("before the start")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = min(self._position, self._size_bytes)
        end = self._size_bytes if size < 0 else min(start + size, self._size_bytes)
        if end - start > MAX_DIRECTORY_BYTES:
            raise OSError(f"a directory of {end - start} bytes")
        before = self._read(start, min(end, self._end_start)) if start < self._end_start else b""
        self._position = end
        return before + self._end[max(0, start - self._end_start) : max(0, end - self._end_start)]


def _directory(file: CheckpointFile, size_bytes: int, read: Read, end_bytes: int) -> Mapping[str, tuple[zipfile.ZipInfo, int]]:
    """The records by name, each with the byte behind which something else begins."""
    try:
        archive = zipfile.ZipFile(_Seen(size_bytes, read, end_bytes))
    except CheckpointError:
        raise
    # struct.error, UnicodeDecodeError and OverflowError among others
    except Exception as error:
        raise CheckpointError(
            f"{file}: truncated or damaged: no archive directory at the end of its {size_bytes} bytes ({_first_line(error)}). Get it again."
        ) from error
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    for info, end in zip(infos, ends, strict=False):
        if not 0 <= info.header_offset < end <= size_bytes:
            raise CheckpointError(
                f"{file}: truncated or damaged: {info.filename!r} is said to begin at byte {info.header_offset}, where something else is."
            )
    if len({info.filename for info in infos}) < len(infos):
        raise CheckpointError(f"{file}: damaged: it holds records of the same name.")
    return {info.filename: (info, end) for info, end in zip(infos, ends, strict=False)}


def _aligned_offset(info: zipfile.ZipInfo, end: int) -> int | None:
    """The first byte of a record, where what stands before and behind it and torch's alignment leave one place for it.

    The directory does not tell, and asking each record's own header takes a request for each.
    """
    earliest = info.header_offset + LOCAL_HEADER_BYTES + len(_name(info))
    for behind_bytes in DESCRIPTOR_BYTES if info.flag_bits & DESCRIPTOR_FLAG else ():
        offset = end - behind_bytes - info.file_size
        if offset % ALIGNMENT == 0 and earliest <= offset <= earliest + LONGEST_PADDING_BYTES:
            return offset
    return None


def _name(info: zipfile.ZipInfo) -> bytes:
    """As it stands in the archive."""
    return info.orig_filename.encode("utf-8" if info.flag_bits & UTF8_FLAG else "cp437")
