"""Which files of a folder are the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

from ..errors import CheckpointError, CheckpointNotFoundError
from .formats import FORMATS, Format, foreign, format_by_content
from .location import CheckpointFile, RemoteFile

__all__ = ["INDEX_ENDING", "choose", "format_of"]

SHARD_NUMBER: Final = re.compile(r"-(\d+)-of-(\d+)$")
INDEX_ENDING: Final = ".index.json"


def choose(names: Sequence[str], folder: str) -> str | list[str]:
    """The index, or the files, among the names in `folder` (a name for messages).

    safetensors wins over other formats, an index over its shards wins over single files, the usual file names win over others (in other
    formats too: `pytorch_model.bin` over `x.gguf`), and shards without an index are taken together. Raises `CheckpointNotFoundError` where
    nothing could be meant or a shard is missing, and `CheckpointError` where several could be meant: it lists them.
    """
    names = sorted(names)
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    for format_ in _formats_of(names, folder):
        own = [name for name in indexes if name.removesuffix(INDEX_ENDING).endswith(format_.suffixes)]
        if (index := _pick(own, format_, INDEX_ENDING, folder)) is not None:
            return index
        families = _families(names, format_)
        # A name that only other formats' users write for a whole model (optimizer.pt) must not be taken when an index is there.
        if len(families) > 1 and len(indexes) == 1 and _pick(_usual(list(families), format_), format_, "", folder) is None:
            return indexes[0]
        if (family := _pick(list(families), format_, "", folder)) is not None:
            return _shards(folder, families[family])
    if len(indexes) > 1:
        raise _several_indexes(folder, indexes)
    if indexes:
        return indexes[0]
    raise CheckpointNotFoundError(
        f"{folder} is not a folder containing a `.index.json` file or a checkpoint "
        f"({', '.join(suffix for format_ in FORMATS for suffix in format_.suffixes)}); it holds: {', '.join(names[:20]) or 'no files'}."
    )


def _families(names: Sequence[str], format_: Format) -> dict[str, list[str]]:
    """The files of a format; shards of one checkpoint together, under their name without numbers."""
    families: dict[str, list[str]] = {}
    for name in names:
        if name.lower().endswith(format_.suffixes):
            path = PurePosixPath(name)
            families.setdefault(SHARD_NUMBER.sub("", path.stem) + path.suffix, []).append(name)
    return families


def _files(names: Sequence[str], format_: Format) -> list[str]:
    return [name for name in names if name.lower().removesuffix(INDEX_ENDING).endswith(format_.suffixes)]


def _stems(names: Sequence[str], format_: Format) -> list[str]:
    """Names of the files and indexes of a format, as they would be without shards."""
    return [*_families(names, format_), *(name.removesuffix(INDEX_ENDING) for name in _files(names, format_))]


def _formats_of(names: Sequence[str], folder: str) -> list[Format]:
    """The format that is meant, if any. Raises `CheckpointError` where it could be one of several."""
    first, *others = FORMATS
    if _files(names, first):
        return [first]
    found = [format_ for format_ in others if _files(names, format_)]
    if len(found) > 1:
        found = [format_ for format_ in found if _usual(_stems(names, format_), format_)] or found
    if len(found) > 1:
        listed = "; ".join(f"{', '.join(_files(names, format_)[:10])} ({format_.name})" for format_ in found)
        raise CheckpointError(f"{folder} holds checkpoints of several formats: {listed}. Name the file that is meant.")
    return found


def format_of(files: Sequence[CheckpointFile], where: str) -> Format:
    """The format of files that were named, by their endings; of one on this machine with another ending by its first bytes.

    Raises `CheckpointError` for files that are no checkpoint's, and for mixed formats.
    """
    if not files:
        raise CheckpointError(f"{where}: the index names no files.")
    found = [_format_by_name(file) or _format_by_content(file, where) for file in files]
    if len(set(found)) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{where}: files of several formats belong to one checkpoint: {names}.")
    return found[0]


def _format_by_name(file: CheckpointFile) -> Format | None:
    return next((format_ for format_ in FORMATS if file.name.lower().endswith(format_.suffixes)), None)


def _format_by_content(file: CheckpointFile, where: str) -> Format:
    known = ", ".join(suffix for format_ in FORMATS for suffix in format_.suffixes)
    problem = f"{where}: {file.name!r} is not the name of a checkpoint file (known endings: {known}, and {INDEX_ENDING})"
    if isinstance(file, RemoteFile):
        raise CheckpointError(f"{problem}.")
    format_, start = format_by_content(file)
    if format_ is None:
        raise CheckpointError(f"{problem}, and {f'it is {stranger}' if (stranger := foreign(start)) else 'does not begin like one.'}")
    return format_


def _usual(names: Sequence[str], format_: Format) -> list[str]:
    usual = [stem + suffix for stem in format_.usual_names for suffix in format_.suffixes]
    return [name for name in usual if name in names]


def _pick(names: Sequence[str], format_: Format, ending: str, folder: str) -> str | None:
    """The only name, or the most usual one, or None where there is none; several unusual ones are an error."""
    if len(names) <= 1:
        return names[0] if names else None
    usual = _usual([name.removesuffix(ending) for name in names], format_)
    if usual:
        return usual[0] + ending
    if ending:
        raise _several_indexes(folder, names)
    raise CheckpointError(f"{folder} holds several checkpoints: {', '.join(names)}. Name the file that is meant.")


def _several_indexes(folder: str, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{folder} contains more than one `.index.json` file, delete the irrelevant ones: {', '.join(names)}.")


def _shards(folder: str, names: list[str]) -> list[str]:
    """The files of one family: a single file beside shards of the same name is ambiguous, and no shard may be missing."""
    numbered = {name: match for name in names if (match := SHARD_NUMBER.search(PurePosixPath(name).stem))}
    if not numbered:
        return names[:1]
    if len(numbered) < len(names):
        raise CheckpointError(f"{folder} holds a single file and shards without an index: {', '.join(names)}. Name the file that is meant.")
    totals = {int(match[2]) for match in numbered.values()}
    if len(totals) > 1:
        raise CheckpointError(f"{folder} holds shards of several checkpoints without an index: {', '.join(names)}. Name the files' index.")
    missing = set(range(1, totals.pop() + 1)) - {int(match[1]) for match in numbered.values()}
    # Some writers count from 0.
    if missing and not (len(missing) == 1 and any(int(match[1]) == 0 for match in numbered.values())):
        raise CheckpointNotFoundError(f"{folder}: shards {sorted(missing)[:20]} are missing beside {', '.join(names[:20])}.")
    return names
