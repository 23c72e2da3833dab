"""Tensors on mapped pages of a checkpoint's files: the CPU computes on them where they lie, in the system's page cache.

Mapped pages take no private memory and are shared with every process that reads the same file. What they risk: a file that is cut short
while an operation reads it ends the process (SIGBUS). So files are mapped only where nobody else is likely to do that, on local file
systems, and each is looked at before every use; one that has changed is refused by name.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from ..constants import KiB, MiB
from ..devices import reading_threads
from ..errors import CheckpointError
from ..settings import environment_flag
from ..waiting import result_of, submitted
from .entry import Entry, contiguous_strides
from .files import OpenFiles
from .location import RemoteFile
from .mapping import map_privately
from .transfer import Transfer
from .workers import workers

__all__ = ["MappedPages", "range_of", "tensor_on"]

ALIGNMENT: Final = 16
"""Where the first element of a tensor of 4-byte numbers or larger has to lie (bytes). On others MKL sums in another order: results differ
in the last bit from those of the same weights in memory of their own. Kernels for smaller numbers do not."""

LOCAL_FILE_SYSTEMS: Final = (
    *("apfs", "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "hfs", "ntfs"),
    *("overlay", "ramfs", "squashfs", "tmpfs", "xfs", "zfs"),
)
"""Others (network, user space) may lose a file's bytes under a reader, or be slow at single pages: what lies there is read, not mapped."""

SAMPLED_BYTES: Final = 4 * MiB
"""One byte in so many is asked whether it is in memory."""

CHUNK_BYTES: Final = 1 * MiB
"""What is read, or not, at a time where some bytes are not in memory."""

GAP_BYTES: Final = 128 * KiB
"""Bytes between two tensors that are read with them rather than skipped."""


class MappedPages:
    """Maps files of a checkpoint, each once, and gives tensors on their pages.

    The mappings are private: what is written to a tensor is seen by this process alone, until `forget`. `enabled=None` maps on local file
    systems, unless the environment variable `BIGMODEL_MAP_FILES` says 0 (never) or 1 (everywhere).
    """

    def __init__(self, files: OpenFiles, enabled: bool | None = None) -> None:
        self._files = files
        self._enabled = enabled
        self._mappings: dict[Path, Any] = {}
        """Buffers; None for what cannot be mapped."""
        self._tensors: dict[str, tuple[Path, torch.Tensor]] = {}
        self._ranges: dict[tuple[str, ...], list[tuple[Path, int, int]]] = {}
        """What tensors that are used together read: the same in every forward."""
        self._read_once: set[tuple[Path, int]] = set()
        """Ranges that were read: where the system does not say what is in memory, once has to do."""
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return MappedPages, (self._files, self._enabled)

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedPages:
        return MappedPages(self._files, self._enabled)

    def can_hold(self, transfer: Transfer) -> bool:
        """Whether the bytes of the file are the tensor: one range of it, in order, of the tensor's dtype, where kernels can read it."""
        found = range_of(transfer)
        if found is None:
            return False
        file, offset = found
        alignment = ALIGNMENT if transfer.dtype.itemsize > 2 else transfer.dtype.itemsize
        return offset % alignment == 0 and self._allows(file) and self._mapping(file) is not None

    def tensors(self, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
        """The tensors of transfers that `can_hold` agreed to. Raises `CheckpointError` when a file has changed since it was opened."""
        known = [self._tensors.get(transfer.target) or self._map(transfer) for transfer in transfers]
        self._files.checked({file for file, _ in known})
        return [tensor for _, tensor in known]

    def absent(self, transfers: Sequence[Transfer]) -> Callable[[], None] | None:
        """What reads the bytes of these that are not in memory, in any thread; None where samples say that all are.

        Reading is better than waiting for the disk in page faults, each of which asks it for little and takes much of the CPU.
        """
        names = tuple([transfer.target for transfer in transfers])
        ranges = self._ranges.get(names)
        if ranges is None:
            ranges = self._ranges[names] = _merged(transfers)
        descriptors = self._files.checked({file for file, _, _ in ranges})
        for file, offset, nbytes in ranges:
            descriptor = descriptors[file]
            samples = (_is_in_memory(descriptor, position) for position in range(offset, offset + nbytes, SAMPLED_BYTES))
            missing = next((sample for sample in samples if not sample), True)
            if missing is False or (missing is None and (file, offset) not in self._read_once):
                self._read_once.add((file, offset))
                return functools.partial(self._read, ranges)
        return None

    def forget(self, name: str) -> None:
        """Something was written to the tensor `name`: later tensors of its file are on pages of a new mapping, as the file has them."""
        with self._lock:
            known = self._tensors.get(name)
            if known is not None:
                self._mappings.pop(known[0], None)
                self._tensors = {other: each for other, each in self._tensors.items() if each[0] != known[0]}

    # --- Inside ---

    def _allows(self, file: Path) -> bool:
        if self._enabled is not None:
            return self._enabled
        return environment_flag("MAP_FILES", _is_local(file.parent))

    def _mapping(self, file: Path) -> Any:
        with self._lock:
            if file not in self._mappings:
                descriptor = self._files.checked([file])[file]
                try:
                    self._mappings[file] = map_privately(descriptor)
                except (OSError, ValueError):  # file systems and limits that allow no mapping, empty files
                    self._mappings[file] = None
            return self._mappings[file]

    def _map(self, transfer: Transfer) -> tuple[Path, torch.Tensor]:
        found = range_of(transfer)
        assert found is not None
        file, offset = found
        mapping = self._mapping(file)
        if mapping is None:
            raise CheckpointError(f"{file}: the system does not map it any more: set BIGMODEL_MAP_FILES=0, which reads it instead.")
        made = (file, tensor_on(mapping, transfer, offset))
        with self._lock:
            if self._mappings.get(file) is mapping:
                made = self._tensors.setdefault(transfer.target, made)
        return made

    def _read(self, ranges: Sequence[tuple[Path, int, int]]) -> None:
        descriptors = self._files.checked({file for file, _, _ in ranges})
        chunks = iter(
            [
                (descriptors[file], start, min(CHUNK_BYTES, offset + nbytes - start))
                for file, offset, nbytes in ranges
                for start in range(offset, offset + nbytes, CHUNK_BYTES)
            ]
        )
        for reading in [submitted(workers, _bring_in, chunks) for _ in range(reading_threads())]:
            result_of(reading)


def _bring_in(chunks: Iterator[tuple[int, int, int]]) -> None:
    """Reads chunks into memory that is thrown away, so that the system keeps them in its own. Threads may share the iterator."""
    scratch = memoryview(bytearray(CHUNK_BYTES))
    for descriptor, offset, nbytes in chunks:
        # The beginning first, since asking may set off the system's own read-ahead, which may have brought the beginning alone.
        is_there = _is_in_memory(descriptor, offset) and _is_in_memory(descriptor, offset + nbytes - 1)
        if not is_there and hasattr(os, "preadv"):
            os.preadv(descriptor, [scratch[:nbytes]], offset)


def tensor_on(mapping: Any, transfer: Transfer, offset: int) -> torch.Tensor:
    """The tensor whose bytes begin at `offset` of a mapped file; it keeps the mapping."""
    count = transfer.nbytes // transfer.dtype.itemsize
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=transfer.dtype, count=count, offset=offset).view(transfer.shape)


def range_of(transfer: Transfer) -> tuple[Path, int] | None:
    """The file, and the byte of it where the tensor begins; None where a file's bytes are not the tensor, in order."""
    if len(transfer.pieces) != 1:
        return None
    piece = transfer.pieces[0]
    entry = piece.origin
    if (
        not isinstance(entry, Entry)
        or entry.contents is not None
        or isinstance(entry.file, RemoteFile)
        or entry.dtype != transfer.dtype
        or piece.shape != transfer.shape
        or 0 in transfer.shape
    ):
        return None
    contiguous = contiguous_strides(transfer.shape)
    if any(size > 1 and own != other for size, own, other in zip(transfer.shape, piece.source_strides, contiguous, strict=True)):
        return None
    return entry.file, entry.offset + piece.source_offset * entry.dtype.itemsize


def _merged(transfers: Sequence[Transfer]) -> list[tuple[Path, int, int]]:
    """File, first byte and bytes of what the transfers read, neighbours together."""
    ranges = []
    for transfer in transfers:
        found = range_of(transfer)
        if found is not None:
            ranges.append((*found, transfer.nbytes))
    merged: list[tuple[Path, int, int]] = []
    for file, offset, nbytes in sorted(ranges):
        if merged and merged[-1][0] == file and offset - sum(merged[-1][1:]) < GAP_BYTES:
            merged[-1] = (file, merged[-1][1], offset + nbytes - merged[-1][1])
        else:
            merged.append((file, offset, nbytes))
    return merged


_SINK: Final = [bytearray(1)]
"""Where bytes go that nobody wants."""


def _is_in_memory(descriptor: int, offset: int) -> bool | None:
    """Whether the byte at `offset` can be had without waiting for the disk; None where the system does not say."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        return os.preadv(descriptor, _SINK, offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # not on this file system
        return None


@functools.lru_cache(maxsize=256)
def _is_local(folder: Path) -> bool:
    return (
        _file_system(os.path.realpath(folder), ((each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)))
        in LOCAL_FILE_SYSTEMS
    )


def _file_system(folder: str, mounts: Iterable[tuple[str, str]]) -> str:
    """The type of the file system that `folder` lies on; of several mounted on one place, the last."""
    around = [(len(place), kind) for place, kind in mounts if folder == place or folder.startswith(place.rstrip("/") + "/")]
    longest = max((length for length, _ in around), default=0)
    return [kind.lower() for length, kind in around if length == longest][-1] if around else ""
