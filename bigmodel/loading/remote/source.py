"""One remote file, whose bytes can be asked for by range."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

from ..entry import FileIdentity
from ..location import RemoteFile
from .fsspec import FsspecSource
from .http import HttpSource

__all__ = ["Source", "read_range", "source_of"]


class Source(Protocol):
    """A remote file. Safe to be used by several threads at once."""

    @property
    def file(self) -> RemoteFile:
        """The file."""
        ...

    @property
    def has_ranges(self) -> bool:
        """Whether a part can be had without what lies before it. Known after the first request."""
        ...

    @property
    def identity(self) -> FileIdentity:
        """Size and state of the file. Asks for them when no request has told yet."""
        ...

    def chunks(self, start: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The bytes from `start` up to `end` (or the file's end), in order, whatever the connection does meanwhile.

        Ends early when `stop` is set. Raises `CheckpointNotFoundError`, and `CheckpointError` when the file cannot be had, changes while it
        is read, or ends before `end`.
        """
        ...


def source_of(file: RemoteFile, identity: FileIdentity | None = None) -> Source:
    """The source of a file: http and https directly, other schemes through fsspec. `identity` is what the file must (still) be."""
    if file.is_web:
        return HttpSource(file, identity)
    return FsspecSource(file, identity)


def read_range(source: Source, start: int, end: int) -> bytes:
    """The bytes from `start` up to `end`, or to the end of the file where that is nearer."""
    return b"".join(source.chunks(start, end))
