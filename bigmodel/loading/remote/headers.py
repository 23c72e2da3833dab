"""Headers and indexes of remote files."""

from __future__ import annotations

from typing import Final

from ...errors import CheckpointError
from ..entry import FileIdentity
from ..formats import Format, Header, RangedFormat
from ..index import check_index_size, parse_index
from ..location import RemoteFile
from .source import read_range, source_of

__all__ = ["read_header", "read_index"]

FIRST_BYTES: Final = 256 << 10
"""Asked for first: with most files their whole header, so that one request does."""

LONGEST_SKIP_BYTES: Final = 64 << 20
"""Received and thrown away for a header, from a server that knows no ranges."""


def read_header(format_: Format, file: RemoteFile, identity: FileIdentity | None) -> tuple[Header, FileIdentity]:
    """The header of a file, and what the file is. `identity` is what is known of it before.

    Raises `CheckpointError` for formats whose headers cannot be read without the rest, and for headers far behind the start of a file whose
    server cannot send a part alone.
    """
    if not isinstance(format_, RangedFormat):
        raise CheckpointError(f"{file}: files of the format {format_.name!r} cannot be read remotely. Download it first.")
    source = source_of(file, identity)
    first = read_range(source, 0, FIRST_BYTES)

    def read(start: int, end: int) -> bytes:
        if start > LONGEST_SKIP_BYTES and not source.has_ranges:
            raise CheckpointError(
                f"{file}: its table of contents is at byte {start}, and its server sends whole files alone. Download it first."
            )
        return first[start:end] if end <= len(first) else first[start:] + read_range(source, max(start, len(first)), end)

    return format_.header_from(file, source.identity.size_bytes, read), source.identity


def read_index(file: RemoteFile, identity: FileIdentity | None = None) -> dict[str, str]:
    """Tensor name → file name, see `parse_index`."""
    source = source_of(file, identity)
    first = read_range(source, 0, FIRST_BYTES)
    check_index_size(source.identity.size_bytes, file)
    return parse_index(first + read_range(source, len(first), source.identity.size_bytes), file)
