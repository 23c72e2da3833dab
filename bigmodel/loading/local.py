"""The files of a checkpoint on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError, CheckpointNotFoundError
from .choose import INDEX_ENDING, choose
from .entry import refuse_stream
from .formats import FORMATS
from .index import check_index_size, parse_index
from .parts import Parts

__all__ = ["local_parts"]


def local_parts(location: Path) -> Parts:
    """The files at a path: a file, an index, or a folder, see `choose`.

    Raises `CheckpointNotFoundError`, and `CheckpointError` for pipes, sockets and devices among others.
    """
    if location.is_dir():
        return _folder_parts(location)
    if location.is_file():
        return _index_parts(location, location) if location.suffix == ".json" else Parts(location, (location,))
    if location.is_symlink():
        raise CheckpointNotFoundError(_dangling(location))
    if location.exists():
        refuse_stream(location.stat().st_mode, location)
    raise CheckpointNotFoundError(
        f"{location}: there is no such file or folder. (A repository on the hub is written 'owner/name' or 'hf://owner/name', as a string.)"
    )


def _folder_parts(folder: Path) -> Parts:
    try:
        chosen = choose([path.name for path in folder.iterdir() if path.is_file()], str(folder))
    except CheckpointNotFoundError:
        _refuse_no_files(folder)
        raise
    if isinstance(chosen, str):
        return _index_parts(folder / chosen, folder)
    return Parts(folder, tuple(folder / name for name in chosen))


def _index_parts(index: Path, location: Path) -> Parts:
    try:
        check_index_size(index.stat().st_size, index)
        names = parse_index(index.read_bytes(), index)
    except OSError as error:
        raise CheckpointError(f"{index}: not a readable index ({type(error).__name__}: {str(error)[:200]}).") from error
    for name in sorted(set(names.values())):
        file = index.parent / name
        if file.is_symlink() and not file.exists():
            raise CheckpointNotFoundError(f"{index}: names the file {name!r}. {_dangling(file)}")
        if file.exists():
            refuse_stream(file.stat().st_mode, file)
        if not file.is_file():
            raise CheckpointNotFoundError(f"{index}: names the file {name!r}, which is not there. Get it again, or delete the index.")
    weight_map = {name: index.parent / file for name, file in names.items()}
    return Parts(location, tuple(sorted(set(weight_map.values()))), weight_map)


def _refuse_no_files(folder: Path) -> None:
    """Raises `CheckpointError` where a link that points to nothing, or a pipe, is in the place of a file of a checkpoint."""
    endings = (INDEX_ENDING, *(suffix for format_ in FORMATS for suffix in format_.suffixes))
    for path in sorted(folder.iterdir()):
        if not path.name.lower().endswith(endings):
            continue
        if path.exists():
            refuse_stream(path.stat().st_mode, path)
        elif path.is_symlink():
            raise CheckpointNotFoundError(_dangling(path))


def _dangling(link: Path) -> str:
    return (
        f"{link}: the link points to nothing: {os.readlink(link)} is not there, as when a file has been evicted from the hub's cache. "
        "Download the file again."
    )
