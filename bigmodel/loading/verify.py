"""Whether files hold the bytes that they should: against hashes that the hub has told, or that are given."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError
from ..progress import Progress
from .checksum import Checksum, mismatch
from .entry import Entry
from .location import CheckpointFile, RemoteFile
from .workers import in_order

__all__ = ["digits_of", "verify_entries", "verify_files"]

CHUNK_BYTES: Final = 4 << 20
READERS: Final = 4
_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class _Expected:
    """A hash in hexadecimal digits: SHA-256 of the bytes (64), or git's SHA-1 of them as a blob (40)."""

    digits: str
    source: str
    """Who says so, for messages."""


def verify_files(
    files: Sequence[CheckpointFile],
    given: Mapping[str, str] | None = None,
    progress: bool | None = None,
    summed: Mapping[CheckpointFile, Mapping[Entry, str]] | None = None,
) -> None:
    """Reads every file and compares its hash, or those of which no hash is known with the checksums of their tensors (`summed`).

    `given` (file name → SHA-256, 64 hexadecimal digits, or git's SHA-1, 40) wins over what the hub's cache records: the name of the blob
    that a snapshot's file links to, or the note that a download to a folder leaves beside it (`.cache/huggingface/download`).

    Raises `CheckpointError` for other bytes (it names the file and both hashes), for a file of which no hash is known, a given name that
    the checkpoint does not have, and remote files.
    """
    unknown = sorted(set(given or ()) - {file.name for file in files})
    if unknown:
        raise CheckpointError(f"No files of the checkpoint are called {unknown[:10]}, for which hashes are given.")
    wanted = [(file, _expected(file, (given or {}).get(file.name), (summed or {}).get(file))) for file in files]
    local = [(file, expected) for file, expected in wanted if not isinstance(file, RemoteFile)]
    with Progress(sum(file.stat().st_size for file, _ in local), "Verifying", show=progress) as bar:
        in_order(lambda item: _verify(item[0], item[1], bar), local, READERS)


def verify_entries(expected: Mapping[Entry, str]) -> None:
    """Reads entries of local files again, and compares them with their checksums. Raises `CheckpointError`."""
    of_file: defaultdict[Path, dict[Entry, str]] = defaultdict(dict)
    for entry, digits in expected.items():
        if isinstance(entry.file, Path) and entry.is_plain:
            of_file[entry.file][entry] = digits
    with Progress(0, "Verifying", show=False) as bar:
        in_order(lambda item: _verify_tensors(item[0], item[1], bar), list(of_file.items()), READERS)


def _verify(file: Path, expected: _Expected | Mapping[Entry, str], bar: Progress) -> None:
    if not isinstance(expected, _Expected):
        _verify_tensors(file, expected, bar)
        return
    found = digits_of(file, len(expected.digits), bar)
    if found != expected.digits:
        raise CheckpointError(
            f"{file}: its bytes are not those that they should be: hash {found}, expected {expected.digits} ({expected.source}). "
            "Get it again."
        )


def _verify_tensors(file: Path, expected: Mapping[Entry, str], bar: Progress) -> None:
    buffer = bytearray(CHUNK_BYTES)
    memory, flat = memoryview(buffer), torch.frombuffer(buffer, dtype=torch.uint8)
    try:
        with open(file, "rb", buffering=0) as stream:
            for entry, digits in expected.items():
                stream.seek(entry.offset)
                found, rest = Checksum(), entry.nbytes
                while rest:
                    wanted = filled = min(rest, CHUNK_BYTES)
                    while wanted and (count := stream.readinto(memory[filled - wanted : filled])):
                        wanted -= count
                    found.update(flat[: filled - wanted])
                    rest = rest - filled if not wanted else 0
                    bar.advance(filled - wanted)
                if found.digits() != digits:
                    raise mismatch(entry)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}.") from error


def digits_of(file: Path, length: int, bar: Progress | None = None) -> str:
    """The hash of a file in `length` hexadecimal digits: SHA-256 (64), or git's SHA-1 (40). Raises `CheckpointError`."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with open(file, "rb", buffering=0) as stream:
            digest: Any = hashlib.sha256()
            if length == 40:
                digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                if bar is not None:
                    bar.advance(count)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}.") from error
    digits: str = digest.hexdigest()
    return digits


def _expected(file: CheckpointFile, given: str | None, summed: Mapping[Entry, str] | None) -> _Expected | Mapping[Entry, str]:
    if isinstance(file, RemoteFile):
        raise CheckpointError(
            f"{file}: cannot be verified before all of it is here. Download it first (huggingface_hub.snapshot_download)."
        )
    if given is not None:
        if not _HASH.fullmatch(given.lower()):
            raise CheckpointError(f"{file}: {given!r} is no hash: 64 hexadecimal digits of SHA-256, or 40 of git's SHA-1.")
        return _Expected(given.lower(), "given")
    blob = file.resolve()
    if blob.parent.name == "blobs" and _HASH.fullmatch(blob.name):
        return _Expected(blob.name, "recorded by the hub")
    for folder in file.parents:
        note = folder / ".cache" / "huggingface" / "download" / file.relative_to(folder).parent / f"{file.name}.metadata"
        if note.is_file():
            lines = note.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 1 and _HASH.fullmatch(lines[1].strip()):
                return _Expected(lines[1].strip(), f"recorded by the hub in {note}")
    if summed:
        return summed
    raise CheckpointError(f"{file}: no hash of it is known: it is not in the hub's cache, and none is given (verify={{'{file.name}': …}}).")
