"""The files of a checkpoint behind a URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

from ...errors import CheckpointNotFoundError
from ..choose import INDEX_ENDING, choose
from ..formats import FORMATS
from ..location import RemoteFile
from ..parts import Parts
from .fsspec import file_system
from .headers import read_index
from .source import source_of

__all__ = ["beside", "url_parts"]

USUAL_NAMES: Final = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin", ".metadata"),
)
"""Tried in a folder on a web server, which does not tell what it holds."""


def url_parts(url: RemoteFile) -> Parts:
    """The files at a URL: of a file, an index, or a folder. Raises `CheckpointNotFoundError` and `CheckpointError`."""
    if url.name.endswith(INDEX_ENDING):
        return _index_parts(url, url)
    if url.name.lower().endswith(tuple(suffix for format_ in FORMATS for suffix in format_.suffixes)):
        return Parts(str(url), (url,))
    if url.is_web:
        return _web_folder_parts(url)
    system, path = file_system(url.url)
    try:
        found = system.ls(path, detail=False)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{url}: there is no such file or folder.") from error
    chosen = choose([PurePosixPath(str(name)).name for name in found], str(url))
    if isinstance(chosen, str):
        return _index_parts(_inside(url)(chosen), url)
    return Parts(str(url), tuple(map(_inside(url), chosen)))


def _web_folder_parts(folder: RemoteFile) -> Parts:
    inside = _inside(folder)
    for name in USUAL_NAMES:
        file = inside(name)
        try:
            identity = source_of(file).identity
        except CheckpointNotFoundError:
            continue
        return _index_parts(file, folder) if name.endswith(INDEX_ENDING) else Parts(str(folder), (file,), identities={file: identity})
    raise CheckpointNotFoundError(f"{folder}: none of {', '.join(USUAL_NAMES)} is there. Give the URL of the file or index that is meant.")


def _index_parts(index: RemoteFile, location: RemoteFile) -> Parts:
    inside = _inside(_folder(index))
    weight_map = {name: inside(file) for name, file in read_index(index).items()}
    return Parts(str(location), tuple(sorted(set(weight_map.values()))), weight_map)


def beside(file: RemoteFile, name: str) -> RemoteFile:
    """The file of a name in the folder that a file lies in."""
    return _inside(_folder(file))(name)


def _folder(file: RemoteFile) -> RemoteFile:
    return file.with_path(file.path[: file.path.rfind("/") + 1])


def _inside(folder: RemoteFile) -> Callable[[str], RemoteFile]:
    """Gives the file of a name in the folder."""
    path = folder.path if folder.path.endswith("/") or not folder.path else f"{folder.path}/"
    # File systems take names as they are.
    return lambda name: folder.with_path(path + (quote(name) if folder.is_web else name))
