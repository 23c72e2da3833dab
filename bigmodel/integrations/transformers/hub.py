"""The folder in which a model's files lie, fetched from the hub where it is not one already."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import CheckpointNotFoundError

__all__ = ["resolve"]


def resolve(path_or_id: str | os.PathLike[str], *, revision: str | None = None, local_files_only: bool = False) -> Path:
    path = Path(path_or_id)
    if path.is_dir():
        return path
    raise CheckpointNotFoundError(f"{os.fspath(path_or_id)!r} is not a folder.")
