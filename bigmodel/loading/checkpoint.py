"""A checkpoint as one table of entries, made from the headers of its files and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from ..text import kind_text
from .checksum import checksums_in
from .choose import format_of
from .entry import Entry, FileIdentity, Sharded
from .formats import Format, Header
from .local import local_parts
from .location import CheckpointFile, HubRepository, RemoteFile, located
from .parts import Parts
from .remote import beside, read_header, repository_parts, url_parts
from .verify import verify_files
from .workers import in_order

__all__ = ["Checkpoint", "Entry", "FileIdentity", "check_open"]

HEADER_READERS: Final = 16
"""Headers read at once: small requests, of which network disks and web servers serve many at a time."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a checkpoint and where their bytes are."""

    entries: Mapping[str, Entry]
    location: Path | str
    """The file or folder that was asked for; for a remote one its URL (`hf://owner/name@commit` on the hub)."""
    format: str
    """`"safetensors"`, `"torch"`, `"torch.distributed"` or `"gguf"`."""
    files: tuple[CheckpointFile, ...]
    metadata: Mapping[str, str]
    """Of all files together; the first file's word counts where they differ."""
    identities: Mapping[CheckpointFile, FileIdentity]
    """The files as they were when their headers were read."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is no tensor, by the name of an entry without bytes: extra states of modules in files of `torch.save`."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What state dicts of torch note of their modules (`state_dict._metadata`), by the modules' names."""

    @classmethod
    def open(cls, where: str | os.PathLike[str], *, verify: bool | Mapping[str, str] = False, keep: bool = False) -> Checkpoint:
        """Reads the headers of the checkpoint at `where`: a file, an index (`*.index.json`), a folder, a repository on the hub, or a URL.

        What a file that is named holds is known by its ending or, where that tells nothing, by its first bytes.

        In a folder safetensors wins over torch's formats, an index over its shards wins over single files, the usual file names win over
        others, and shards without an index are taken together.

        A string that names something on this machine is local, and so is every `Path`. `owner/name` (or `owner/name@revision`,
        `hf://owner/name@revision/folder`) is a repository on the hub: files in the hub's cache are used, of the others only the headers are
        fetched. http(s) URLs, and those of any scheme that fsspec knows, name a file, an index, or a folder. Endpoint, token, cache and
        offline mode are huggingface_hub's (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE`).

        `verify` reads every file once and compares its hash with what the hub has recorded for it, or with a given one (file name →
        SHA-256, or git's SHA-1, in hexadecimal digits). Files of packed weights that bigmodel wrote are compared with their own checksums.

        `keep` is for repositories on the hub: a file that is read for the most part is completed in the hub's cache, and compared with the
        hash that the hub has recorded, so that the next time it is on this machine.

        Raises `CheckpointNotFoundError`, or `CheckpointError` for damaged files, an index that does not fit its files, folders in which
        several checkpoints could be meant (it lists them), servers that cannot be reached, and files whose hash is another or not known.
        """
        parts = _parts(located(where), keep)
        format_ = format_of(parts.files, str(parts.location))
        local: dict[CheckpointFile, FileIdentity] = {
            file: FileIdentity.of(file) for file in parts.files if not isinstance(file, RemoteFile)
        }
        headers, remote = _read_headers(format_, parts)
        entries = _joined(parts.files, headers, parts.weight_map, parts.location)
        files = tuple(dict.fromkeys((*parts.files, *_all_files(entries.values()))))
        local |= {file: FileIdentity.of(file) for file in files if not isinstance(file, RemoteFile) and file not in local}
        metadata = dict(item for header in reversed(headers) for item in header.metadata.items())
        values = {name: value for header in headers for name, value in header.values.items()}
        versions = dict(item for header in reversed(headers) for item in header.versions.items())
        checkpoint = cls(entries, parts.location, format_.name, files, metadata, local | remote, values, versions)
        if verify:
            verify_files(files, None if isinstance(verify, bool) else verify, summed=checkpoint._summed())
        checkpoint.check_unchanged()
        return checkpoint

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as they would lie contiguous in memory."""
        return sum(entry.numel * entry.dtype.itemsize for entry in self.entries.values())

    def _summed(self) -> dict[CheckpointFile, dict[Entry, str]]:
        """The files of whose tensors all checksums are known, with these."""
        sums = checksums_in(self.metadata)
        entries: dict[CheckpointFile, list[Entry]] = {}
        for entry in self.entries.values():
            entries.setdefault(entry.file, []).append(entry)
        return {file: {entry: sums[entry.name] for entry in own} for file, own in entries.items() if all(each.name in sums for each in own)}

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` when a file on this machine is no longer the one whose header was read, naming it.

        A remote file is checked whenever something of it is read.
        """
        for file, identity in self.identities.items():
            if not isinstance(file, RemoteFile):
                identity.check(FileIdentity.of(file), file)


def check_open(checkpoint: object) -> None:
    """Raises `CheckpointError` for what is no open checkpoint, such as a path."""
    if not isinstance(checkpoint, Checkpoint):
        raise CheckpointError(f"{kind_text(checkpoint)} is no open checkpoint: give bigmodel.Checkpoint.open({checkpoint!r:.200}).")


def _parts(place: Path | RemoteFile | HubRepository, keep: bool) -> Parts:
    if isinstance(place, HubRepository):
        return repository_parts(place, keep=keep)
    if keep and isinstance(place, RemoteFile):
        raise CheckpointError(f"{place}: keep=True is for repositories on the hub, whose cache has a place for their files.")
    return url_parts(place) if isinstance(place, RemoteFile) else local_parts(place)


def _read_headers(format_: Format, parts: Parts) -> tuple[list[Header], dict[CheckpointFile, FileIdentity]]:
    """The headers in the order of the files, and what the remote files were when they were read."""
    remote: dict[CheckpointFile, FileIdentity] = {}

    def read(file: CheckpointFile) -> Header:
        if not isinstance(file, RemoteFile):
            return format_.read_header(file)
        header, known = read_header(format_, file, parts.identities, parts.beside or partial(beside, file))
        remote.update(known)
        return header

    if len(parts.files) == 1:
        return [read(parts.files[0])], remote
    return in_order(read, parts.files, HEADER_READERS), remote


def _all_files(entries: Iterable[Entry]) -> Iterator[CheckpointFile]:
    for entry in entries:
        yield entry.file
        if isinstance(entry.contents, Sharded):
            yield from (part.file for _, part in entry.contents.parts)


def _joined(
    files: Sequence[CheckpointFile], headers: Sequence[Header], weight_map: Mapping[str, CheckpointFile], location: Path | str
) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file, header in zip(files, headers, strict=True):
        for entry in header.entries:
            if weight_map.get(entry.name, file) != file:
                continue  # the index says which of two copies counts
            if entry.name in entries:
                raise CheckpointError(f"{location}: {entry.name!r} is in both {entries[entry.name].file.name} and {file.name}.")
            entries[entry.name] = entry
    for name, file in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{location}: the index says that {name!r} is in {file.name}, but it is not.")
    return entries
