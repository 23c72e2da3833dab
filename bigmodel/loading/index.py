"""The index of a sharded checkpoint: tensor name → file."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from ..errors import CheckpointError
from .json_text import parse_object
from .location import CheckpointFile

__all__ = ["MAX_INDEX_BYTES", "check_index_size", "parse_index"]

MAX_INDEX_BYTES: Final = 1 << 26
"""Several times the index of the largest known checkpoint, of 140,000 tensors."""


LONGEST_NAME_BYTES: Final = 255
"""Of a file, on every file system in use."""


def check_index_size(size_bytes: int, file: CheckpointFile) -> None:
    """Raises `CheckpointError` for a file that is too large to be an index."""
    if size_bytes > MAX_INDEX_BYTES:
        raise CheckpointError(f"{file}: an index of {size_bytes} bytes is no index.")


def parse_index(text: bytes, file: CheckpointFile) -> dict[str, str]:
    """Tensor name → file name, from `{"weight_map": {…}}` or the bare map. `file` is the index, for messages.

    Raises `CheckpointError` for anything else, and for names of files outside the index's folder.
    """
    index = parse_object(text, file, "the index")
    weight_map = index.get("weight_map", index)
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{file}: not an index of a checkpoint: it should hold 'weight_map', tensor name → file name.")
    for name in set(weight_map.values()):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not name:
            raise CheckpointError(f"{file}: names the file {name!r} outside its folder.")
        if any(len(part.encode("utf-8", "surrogatepass")) > LONGEST_NAME_BYTES for part in path.parts):
            raise CheckpointError(f"{file}: names the file {name[:100]!r}…, of {len(name)} characters: no file system has such names.")
    return weight_map
