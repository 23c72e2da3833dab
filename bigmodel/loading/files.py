"""Open files of a checkpoint: each opened once, its identity looked at before every batch of reads."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence

from ..errors import CheckpointError, CheckpointNotFoundError
from .entry import FileIdentity
from .location import CheckpointFile, RemoteFile

__all__ = ["OpenFiles", "read_scattered"]

_position = threading.Lock()


def read_scattered(descriptor: int, buffers: Sequence[memoryview], offset: int, file: CheckpointFile) -> None:
    """Fills `buffers` one after the other from `offset` on, with the interpreter free meanwhile.

    Raises `CheckpointError` at the file's end.
    """
    pending = list(buffers)
    while pending:
        count = _read(descriptor, pending, offset)
        if count == 0:
            wanted = sum(buffer.nbytes for buffer in pending)
            raise CheckpointError(f"{file}: truncated: expected {offset + wanted} bytes, the file ends at {offset}.")
        offset += count
        while pending and count >= pending[0].nbytes:
            count -= pending.pop(0).nbytes
        if count:
            pending[0] = pending[0][count:]


def _read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    with _position:  # systems without positioned reads: the position belongs to the descriptor
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, buffers[0].nbytes)
    buffers[0][: len(data)] = data
    return len(data)


def _close(descriptors: dict[CheckpointFile, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


class OpenFiles:
    """Descriptors by path, opened when first needed, shared by everything that reads from them, closed with the last of these."""

    def __init__(self, identities: Mapping[CheckpointFile, FileIdentity] | None = None) -> None:
        self._identities = dict(identities or {})
        self._descriptors: dict[CheckpointFile, int] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._descriptors)

    def checked(self, files: Iterable[CheckpointFile]) -> dict[CheckpointFile, int]:
        """Descriptors of `files`. Raises `CheckpointError` when one is not what it was when the checkpoint was opened."""
        found = {}
        for file in files:
            descriptor = self._descriptors.get(file)
            if descriptor is None:
                descriptor = self._open(file)
            now = FileIdentity.of(descriptor)
            self._identities.setdefault(file, now).check(now, file)
            found[file] = descriptor
        return found

    def _open(self, file: CheckpointFile) -> int:
        with self._lock:
            if file not in self._descriptors:
                assert not isinstance(file, RemoteFile), file
                try:
                    self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
                except FileNotFoundError as error:
                    raise CheckpointNotFoundError(f"{file}: the file is gone since the checkpoint was opened.") from error
                except OSError as error:
                    raise CheckpointError(f"{file}: cannot be read: {error}.") from error
            return self._descriptors[file]

    def close(self) -> None:
        """Closes all descriptors; a later read opens them again."""
        with self._lock:
            _close(self._descriptors)

    def __getstate__(self) -> dict[CheckpointFile, FileIdentity]:
        return self._identities

    def __setstate__(self, state: dict[CheckpointFile, FileIdentity]) -> None:
        self.__init__(state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, object]) -> OpenFiles:
        return self
