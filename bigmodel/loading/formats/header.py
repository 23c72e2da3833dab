"""What every format reads from a file: its entries, and nothing of their bytes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from ...errors import CheckpointError, CheckpointNotFoundError
from ..entry import Entry
from ..location import CheckpointFile

__all__ = ["START_BYTES", "FolderFormat", "Format", "Header", "Opened", "RangedFormat", "foreign", "open_local", "read_local"]

START_BYTES: Final = 64
"""Of a file, that tell what it is."""


def foreign(start: bytes) -> str | None:
    """What came in the place of a checkpoint's file, by the file's first bytes, and what to do; None for what is not known by them."""
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git LFS, not the file that it stands for. Fetch that with `git lfs pull`, or download it by its own link."
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "a web page, not a checkpoint: what was downloaded is perhaps the page about the file, or one to log in. Get it again."
    return None


@dataclass(frozen=True, slots=True)
class Opened:
    """A file of which parts can be read, wherever it lies."""

    file: CheckpointFile
    size_bytes: int
    read: Callable[[int, int], bytes]
    """The bytes from a position up to another."""
    read_all: Callable[[Sequence[tuple[int, int]]], list[bytes]]
    """Those of several parts, at once where that is faster."""


@dataclass(frozen=True, slots=True)
class Header:
    """The table of contents of one file."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is no tensor and stands in the header itself, by the name of an entry without bytes: extra states of modules."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What a state dict of torch notes of the modules that it was made of, by their names."""


class Format(Protocol):
    """A file format. To add one, write a module with this and list it in `formats/__init__.py`."""

    @property
    def name(self) -> str:
        """The format's name, as `Checkpoint.format` gives it."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """File name endings, lower case."""
        ...

    @property
    def usual_names(self) -> tuple[str, ...]:
        """Stems of the files that libraries write, most usual first: they win over other files in a folder."""
        ...

    def read_header(self, file: Path) -> Header:
        """Entries and metadata of `file`. Raises `CheckpointError`, naming the file."""
        ...


@runtime_checkable
class RangedFormat(Protocol):
    """A format whose headers can be read from bytes alone, so that its files need not be on this machine."""

    def header_from(self, file: CheckpointFile, size_bytes: int, read: Callable[[int, int], bytes]) -> Header:
        """Entries and metadata of `file`, which has `size_bytes`; `read` gives the bytes from a position up to another.

        Raises `CheckpointError`, naming the file.
        """
        ...


@runtime_checkable
class FolderFormat(Protocol):
    """A format of which one file tells what lies in others beside it."""

    def header_among(self, table: Opened, beside: Callable[[str], Opened]) -> Header:
        """Entries and metadata by the file `table`; `beside` opens those of other names in its folder.

        Raises `CheckpointError`, naming the file.
        """
        ...


@contextlib.contextmanager
def open_local(file: Path) -> Iterator[Opened]:
    """A file on this machine, which is open in the block.

    Raises `CheckpointNotFoundError`, and `CheckpointError` where it cannot be read.
    """
    try:
        with open(file, "rb") as stream:

            def read(start: int, end: int) -> bytes:
                stream.seek(start)
                return stream.read(end - start)

            yield Opened(file, stream.seek(0, io.SEEK_END), read, lambda parts: [read(*part) for part in parts])
    except CheckpointError:  # some of these are errors of the system, too
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{file}: there is no such file.") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}.") from error


def read_local(file: Path, header_from: Callable[[CheckpointFile, int, Callable[[int, int], bytes]], Header]) -> Header:
    """The header of a file on this machine, by `RangedFormat.header_from`. Raises what that and `open_local` raise."""
    with open_local(file) as opened:
        return header_from(file, opened.size_bytes, opened.read)
