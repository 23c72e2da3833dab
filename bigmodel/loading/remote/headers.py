"""Headers and indexes of remote files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ...errors import CheckpointError
from ..entry import FileIdentity
from ..formats import FolderFormat, Format, Header, Opened, RangedFormat, open_local
from ..index import check_index_size, parse_index
from ..location import CheckpointFile, RemoteFile
from ..workers import in_order
from .reader import IN_FLIGHT
from .source import Source, read_range, source_of

__all__ = ["read_header", "read_index"]

FIRST_BYTES: Final = 256 << 10
"""Asked for first: with most files their whole header, so that one request does."""

LONGEST_SKIP_BYTES: Final = 64 << 20
"""Received and thrown away for a header, from a server that knows no ranges."""


def read_header(
    format_: Format, file: RemoteFile, identities: Mapping[CheckpointFile, FileIdentity], beside: Callable[[str], CheckpointFile]
) -> tuple[Header, dict[CheckpointFile, FileIdentity]]:
    """The header of a file, and what the remote files that it was read from are.

    `identities` are what is known of files before, `beside` gives those of other names in the same folder. Raises `CheckpointError` for
    headers far behind the start of a file whose server cannot send a part alone, among others.
    """
    sources: dict[CheckpointFile, Source] = {}

    def opened(remote: RemoteFile, first_bytes: int) -> Opened:
        source = sources[remote] = source_of(remote, identities.get(remote))
        return _opened(source, first_bytes)

    with contextlib.ExitStack() as stack:

        def opened_beside(name: str) -> Opened:
            found = beside(name)
            return opened(found, 0) if isinstance(found, RemoteFile) else stack.enter_context(open_local(found))

        table = opened(file, FIRST_BYTES)
        if isinstance(format_, FolderFormat):
            header = format_.header_among(table, opened_beside)
        else:
            assert isinstance(format_, RangedFormat)
            header = format_.header_from(file, table.size_bytes, table.read)
    return header, {remote: source.identity for remote, source in sources.items()}


def _opened(source: Source, first_bytes: int) -> Opened:
    """A remote file, of which the beginning has been read."""
    first = read_range(source, 0, first_bytes) if first_bytes else b""

    def read(start: int, end: int) -> bytes:
        if start > LONGEST_SKIP_BYTES and not source.has_ranges:
            raise CheckpointError(
                f"{source.file}: its table of contents is at byte {start}, and its server sends whole files alone. Download it first."
            )
        return first[start:end] if end <= len(first) else first[start:] + read_range(source, max(start, len(first)), end)

    def read_all(parts: Sequence[tuple[int, int]]) -> list[bytes]:
        return in_order(lambda part: read(*part), parts, IN_FLIGHT)

    return Opened(source.file, source.identity.size_bytes, read, read_all)


def read_index(file: RemoteFile, identity: FileIdentity | None = None) -> dict[str, str]:
    """Tensor name → file name, see `parse_index`."""
    source = source_of(file, identity)
    first = read_range(source, 0, FIRST_BYTES)
    check_index_size(source.identity.size_bytes, file)
    return parse_index(first + read_range(source, len(first), source.identity.size_bytes), file)
