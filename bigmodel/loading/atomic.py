"""Files that are there completely or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "write_all", "write_atomically"]


@contextlib.contextmanager
def atomic_file(file: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary neighbour of `file`, which takes its place when the block ends; an error leaves no trace."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.", suffix=".tmp")
    try:
        with open(descriptor, "wb", buffering=0) as stream:
            yield stream
        # mkstemp keeps others out; a checkpoint is as readable as any file that the user writes.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_all(stream: BinaryIO, data: bytes | memoryview) -> None:
    """Writes every byte: an unbuffered stream may take only part of them at once (2 GiB at most on Linux)."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[stream.write(rest) :]


def write_atomically(file: Path, data: bytes | memoryview) -> None:
    """Writes a whole file in one step."""
    with atomic_file(file) as stream:
        write_all(stream, data)
