"""Files that are there completely or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import BigModelError, CheckpointError
from .interrupts import uninterrupted

__all__ = ["atomic_file", "folder_to_write", "write_all", "write_atomically"]


@contextlib.contextmanager
def atomic_file(file: Path, stays: Callable[[], bool] | None = None) -> Iterator[BinaryIO]:
    """A stream to a temporary neighbour of `file`, which takes its place when the block ends; an error leaves no trace.

    Where there is a file by then, `stays` says whether that one stays: somebody else may have written the same, and be reading it already.
    """
    temporary = ""
    try:
        with uninterrupted():
            descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.", suffix=".tmp")
            opened = open(descriptor, "wb", buffering=0)  # noqa: SIM115 (so that the descriptor has an owner before a signal is heeded)
        with opened as stream:
            yield stream
        with uninterrupted():
            # mkstemp keeps others out; a checkpoint is as readable as any file that the user writes.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            if stays is None or not (_linked(temporary, file) or stays()):
                os.replace(temporary, file)
            else:
                os.unlink(temporary)
    except BaseException:
        with uninterrupted(), contextlib.suppress(FileNotFoundError):
            if temporary:
                os.unlink(temporary)
        raise


def _linked(temporary: str, file: Path) -> bool:
    """Gives what is written its name, in one step, if nothing has that name yet. Not where file systems know no links."""
    try:
        os.link(temporary, file)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def folder_to_write(folder: Path, names: Collection[str] = ()) -> Iterator[None]:
    """Makes `folder` for the block to write in. After an error, what was not there before is gone: the files `names`, and folders.

    What the system refuses (a file in the way, no permission, a full disk) becomes a `CheckpointError` that names the folder.
    """
    made: list[Path] = []
    new: list[Path] = []
    try:
        made += [level for level in (folder, *folder.parents) if not level.exists()]
        new += [folder / name for name in names if not (folder / name).exists()]
        if folder.is_file():
            raise CheckpointError(f"{folder}: it is a file, so nothing can be written into it. Give the name of a folder.")
        os.makedirs(folder, exist_ok=True)
        yield
    except BaseException as error:
        with uninterrupted(), contextlib.suppress(OSError):
            for file in new:
                file.unlink(missing_ok=True)
            for level in made:
                level.rmdir()  # the deepest first; stops at one that somebody else uses
        if isinstance(error, OSError) and not isinstance(error, BigModelError):
            raise CheckpointError(f"{folder}: writing failed, nothing half written was left: {error}.") from error
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
