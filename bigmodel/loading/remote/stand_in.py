"""A remote file as far as its header: for libraries that read headers from files alone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..location import RemoteFile
from .source import read_range, source_of

__all__ = ["header_file"]


@contextlib.contextmanager
def header_file(file: RemoteFile, header_bytes: int) -> Iterator[Path]:
    """A file on this machine of the name and size of `file`, with its first `header_bytes`; the rest is a hole. It goes with the block.

    Raises `CheckpointError` when they cannot be had.
    """
    source = source_of(file)
    header = read_range(source, 0, header_bytes)
    with tempfile.TemporaryDirectory(prefix="bigmodel-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / file.name
        with open(place, "wb") as stream:
            stream.write(header)
            stream.truncate(source.identity.size_bytes)
        yield place
