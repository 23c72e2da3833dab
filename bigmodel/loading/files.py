"""Open files of a checkpoint: each opened once, its identity looked at before every batch of reads."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError, CheckpointNotFoundError
from .entry import FileIdentity
from .location import CheckpointFile, RemoteFile, working_folder

resource: Any = None
with contextlib.suppress(ImportError):  # Windows has none
    import resource

__all__ = ["OpenFiles", "read_scattered"]

logger = logging.getLogger(__name__)

# A pipe that has taken the place of a file would be waited for, if it were not for O_NONBLOCK, which means nothing for files.
OPENED: Final = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK"))

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


def _close(*tables: dict[CheckpointFile, int]) -> None:
    for descriptors in tables:
        while descriptors:
            os.close(descriptors.popitem()[1])


def _opened(file: Path) -> int:
    """A descriptor. Where the process has as many as it may, it may have as many as it could allow itself from then on.

    Only then: code that waits by select(2) cannot do so for descriptors beyond 1023, and the system's default keeps them below. Raises
    OSError.
    """
    try:
        return os.open(file, OPENED)
    except OSError as error:
        if error.errno != errno.EMFILE or not _raise_limit():
            raise
    return os.open(file, OPENED)


def _raise_limit() -> bool:
    """Whether the process may have more open files now."""
    if resource is None:
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS allows less than it says
        return False
    logger.info("The limit of open files (ulimit -n) was %d and is %d now: a checkpoint has more files.", soft, hard)
    return True


def _too_many(file: Path, count: int) -> str:
    limit = "" if resource is None else f" ({resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return (
        f"{file}: cannot be opened beside {count} other files of the checkpoint: the process has as many files open as it may{limit}. "
        "Allow it more (`ulimit -n 4096` in the shell that starts it), close others, or save the checkpoint in fewer files."
    )


class OpenFiles:
    """Descriptors by path, opened when first needed, shared by everything that reads from them, closed with the last of these."""

    def __init__(self, identities: Mapping[CheckpointFile, FileIdentity] | None = None) -> None:
        self._identities = dict(identities or {})
        self._here = working_folder()
        """Where relative paths begin, also when the program has gone elsewhere before it reads."""
        self._descriptors: dict[CheckpointFile, int] = {}
        self._past_cache: dict[CheckpointFile, int] = {}
        self._refused: set[CheckpointFile] = set()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._descriptors, self._past_cache)

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
                    self._descriptors[file] = _opened(self._here / file)
                except FileNotFoundError as error:
                    raise CheckpointNotFoundError(f"{file}: the file is gone since the checkpoint was opened.") from error
                except OSError as error:
                    if error.errno == errno.EMFILE:
                        raise CheckpointError(_too_many(file, len(self._descriptors))) from error
                    raise CheckpointError(f"{file}: cannot be read: {error}.") from error
            return self._descriptors[file]

    def past_cache(self, file: CheckpointFile) -> int | None:
        """A descriptor of an open file whose reads go past the page cache; None where the file system has none to give."""
        with self._lock:
            if file in self._refused:
                return None
            if file not in self._past_cache:
                assert not isinstance(file, RemoteFile), file
                try:
                    descriptor = os.open(self._here / file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError:
                    self._refused.add(file)
                    return None
                if FileIdentity.of(descriptor) != FileIdentity.of(self._descriptors[file]):
                    os.close(descriptor)  # another file has taken its place: only the first descriptor leads to the right one
                    self._refused.add(file)
                    return None
                self._past_cache[file] = descriptor
            return self._past_cache[file]

    def refuse_past_cache(self, file: CheckpointFile) -> None:
        """Remembers that reads past the page cache fail for this file."""
        with self._lock:
            self._refused.add(file)

    def close(self) -> None:
        """Closes all descriptors; a later read opens them again."""
        with self._lock:
            _close(self._descriptors, self._past_cache)

    def __getstate__(self) -> dict[CheckpointFile, FileIdentity]:
        return self._identities

    def __setstate__(self, state: dict[CheckpointFile, FileIdentity]) -> None:
        self.__init__(state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, object]) -> OpenFiles:
        return self
