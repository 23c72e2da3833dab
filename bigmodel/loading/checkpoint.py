"""A checkpoint as one table of entries, made from the headers of its files and nothing else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, CheckpointNotFoundError
from .entry import Entry, FileIdentity
from .formats import FORMATS, Format, Header

__all__ = ["Checkpoint", "Entry", "FileIdentity"]

SHARD_NUMBER: Final = re.compile(r"-(\d+)-of-(\d+)$")
MAX_INDEX_BYTES: Final = 1 << 28
HEADER_READERS: Final = 8
"""Headers read at once: small requests, of which network disks serve many at a time."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a checkpoint and where their bytes are."""

    entries: Mapping[str, Entry]
    location: Path
    """The file or folder that was asked for."""
    format: str
    """`"safetensors"` or `"torch"`."""
    files: tuple[Path, ...]
    metadata: Mapping[str, str]
    """Of all files together; the first file's word counts where they differ."""
    identities: Mapping[Path, FileIdentity]
    """The files as they were when their headers were read."""

    @classmethod
    def open(cls, where: str | Path) -> Checkpoint:
        """Reads the headers of the checkpoint at `where`: a file, an index (`*.index.json`), or a folder.

        In a folder safetensors wins over torch's formats, an index over its shards wins over single files, the usual file names win over
        others, and shards without an index are taken together. Raises `CheckpointNotFoundError`, or `CheckpointError` for damaged files,
        an index that does not fit its files, and folders in which several checkpoints could be meant (it lists them).
        """
        location = Path(where)
        if location.is_dir():
            chosen = _choose(location)
        elif location.is_file():
            chosen = location
        elif location.is_symlink():
            raise CheckpointNotFoundError(_dangling(location))
        else:
            raise CheckpointNotFoundError(
                f"{location}: there is no such file or folder. (The name of a repository on the hub has to be downloaded first, "
                "for example by huggingface_hub.snapshot_download.)"
            )
        if isinstance(chosen, Path) and chosen.suffix == ".json":
            weight_map = _read_index(chosen)
            files = sorted(set(weight_map.values()))
        else:
            weight_map = {}
            files = [chosen] if isinstance(chosen, Path) else list(chosen)
        format_ = _format_of(files, location)
        identities = {file: FileIdentity.of(file) for file in files}
        headers = _read_headers(format_, files)
        entries = _joined(files, headers, weight_map, location)
        metadata = dict(item for header in reversed(headers) for item in header.metadata.items())
        checkpoint = cls(entries, location, format_.name, tuple(files), metadata, identities)
        checkpoint.check_unchanged()
        return checkpoint

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as they would lie contiguous in memory."""
        return sum(entry.numel * entry.dtype.itemsize for entry in self.entries.values())

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` when a file is no longer the one whose header was read, naming it."""
        for file, identity in self.identities.items():
            identity.check(FileIdentity.of(file), file)


def _format_of(files: Sequence[Path], location: Path) -> Format:
    if not files:
        raise CheckpointError(f"{location}: the index names no files.")
    found = []
    for file in files:
        format_ = next((format_ for format_ in FORMATS if file.name.lower().endswith(format_.suffixes)), None)
        if format_ is None:
            known = ", ".join(suffix for format_ in FORMATS for suffix in format_.suffixes)
            raise CheckpointError(f"{file}: not the name of a checkpoint file (known endings: {known}, and .index.json).")
        found.append(format_)
    if len(set(found)) > 1:
        raise CheckpointError(f"{location}: files of several formats belong to one checkpoint: {', '.join(file.name for file in files)}.")
    return found[0]


def _choose(folder: Path) -> Path | list[Path]:
    """The index, the file, or the shards that the folder holds. Raises `CheckpointError` when none or several could be meant."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    indexes = [name for name in names if name.endswith(".index.json")]
    for format_ in FORMATS:
        own = [name for name in indexes if name.removesuffix(".index.json").endswith(format_.suffixes)]
        if (index := _pick(own, format_, ".index.json", folder)) is not None:
            return folder / index
        files = [name for name in names if name.lower().endswith(format_.suffixes)]
        families: dict[str, list[str]] = {}
        for name in files:
            families.setdefault(SHARD_NUMBER.sub("", Path(name).stem) + Path(name).suffix, []).append(name)
        # A name that only other formats' users write for a whole model (optimizer.pt) must not be taken when an index is there.
        if len(families) > 1 and len(indexes) == 1 and _pick(_usual(list(families), format_), format_, "", folder) is None:
            return folder / indexes[0]
        if (family := _pick(list(families), format_, "", folder)) is not None:
            return _shards(folder, families[family])
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} contains more than one `.index.json` file, delete the irrelevant ones: {', '.join(indexes)}.")
    if indexes:
        return folder / indexes[0]
    _refuse_dangling(folder)
    raise CheckpointNotFoundError(
        f"{folder} is not a folder containing a `.index.json` file or a checkpoint "
        f"({', '.join(suffix for format_ in FORMATS for suffix in format_.suffixes)}); it holds: {', '.join(names[:20]) or 'no files'}."
    )


def _refuse_dangling(folder: Path) -> None:
    """Raises `CheckpointNotFoundError` where a link in place of a file of a checkpoint points to nothing."""
    endings = (".index.json", *(suffix for format_ in FORMATS for suffix in format_.suffixes))
    for path in sorted(folder.iterdir()):
        if path.name.lower().endswith(endings) and path.is_symlink() and not path.exists():
            raise CheckpointNotFoundError(_dangling(path))


def _dangling(link: Path) -> str:
    return (
        f"{link}: the link points to nothing: {os.readlink(link)} is not there, as when a file has been evicted from the hub's cache. "
        "Download the file again."
    )


def _usual(names: Sequence[str], format_: Format) -> list[str]:
    usual = [stem + suffix for stem in format_.usual_names for suffix in format_.suffixes]
    return [name for name in usual if name in names]


def _pick(names: Sequence[str], format_: Format, ending: str, folder: Path) -> str | None:
    """The only name, or the most usual one, or None where there is none; several unusual ones are an error."""
    if len(names) <= 1:
        return names[0] if names else None
    usual = _usual([name.removesuffix(ending) for name in names], format_)
    if usual:
        return usual[0] + ending
    if ending:
        raise CheckpointError(f"{folder} contains more than one `.index.json` file, delete the irrelevant ones: {', '.join(names)}.")
    raise CheckpointError(f"{folder} holds several checkpoints: {', '.join(names)}. Name the file that is meant.")


def _shards(folder: Path, names: list[str]) -> Path | list[Path]:
    """The files of one family: a single file beside shards of the same name is ambiguous, and no shard may be missing."""
    numbered = {name: match for name in names if (match := SHARD_NUMBER.search(Path(name).stem))}
    if not numbered:
        return folder / names[0]
    if len(numbered) < len(names):
        raise CheckpointError(f"{folder} holds a single file and shards without an index: {', '.join(names)}. Name the file that is meant.")
    totals = {int(match[2]) for match in numbered.values()}
    if len(totals) > 1:
        raise CheckpointError(f"{folder} holds shards of several checkpoints without an index: {', '.join(names)}. Name the files' index.")
    missing = set(range(1, totals.pop() + 1)) - {int(match[1]) for match in numbered.values()}
    # Some writers count from 0.
    if missing and not (len(missing) == 1 and any(int(match[1]) == 0 for match in numbered.values())):
        _refuse_dangling(folder)
        raise CheckpointNotFoundError(f"{folder}: shards {sorted(missing)[:20]} are missing beside {', '.join(names[:20])}.")
    return [folder / name for name in names]


def _read_index(file: Path) -> dict[str, Path]:
    """Tensor name → file, from `{"weight_map": {…}}` or the bare map. File names stay inside the index's folder."""
    try:
        if file.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{file}: an index of {file.stat().st_size} bytes is no index.")
        index = json.loads(file.read_text(encoding="utf-8"))
    except (RecursionError, ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: not a readable index ({type(error).__name__}: {str(error)[:200]}).") from error
    weight_map = index.get("weight_map", index) if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{file}: not an index of a checkpoint: it should hold 'weight_map', tensor name → file name.")
    for name in set(weight_map.values()):
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not name:
            raise CheckpointError(f"{file}: names the file {name!r} outside its folder.")
        if (file.parent / path).is_symlink() and not (file.parent / path).exists():
            raise CheckpointNotFoundError(f"{file}: names the file {name!r}. {_dangling(file.parent / path)}")
        if not (file.parent / path).is_file():
            raise CheckpointNotFoundError(f"{file}: names the file {name!r}, which is not there. Get it again, or delete the index.")
    return {name: file.parent / path for name, path in weight_map.items()}


def _read_headers(format_: Format, files: Sequence[Path]) -> list[Header]:
    if len(files) == 1:
        return [format_.read_header(files[0])]
    with ThreadPoolExecutor(min(HEADER_READERS, len(files))) as pool:
        return list(pool.map(format_.read_header, files))


def _joined(files: Sequence[Path], headers: Sequence[Header], weight_map: Mapping[str, Path], location: Path) -> dict[str, Entry]:
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
