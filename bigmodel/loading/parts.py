"""The files of a checkpoint, found but not read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .entry import FileIdentity
from .location import CheckpointFile

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Which files make a checkpoint, wherever they lie."""

    location: Path | str
    """What was asked for: a file or folder on this machine, or the URL of a remote one (`hf://owner/name@commit`)."""
    files: tuple[CheckpointFile, ...]
    weight_map: Mapping[str, CheckpointFile] = field(default_factory=dict)
    """Tensor name → file, where an index says so."""
    identities: Mapping[CheckpointFile, FileIdentity] = field(default_factory=dict)
    """What is known of remote files before anything of them is read."""
    beside: Callable[[str], CheckpointFile] | None = None
    """Gives the file of a name in the same folder, where URLs alone do not tell it."""
