"""Whose an offload folder is: a note beside its index, so that no model runs with another one's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import nn

from ..constants import OFFLOAD_INDEX_NAME
from ..errors import CheckpointError
from ..modules import named_module_tensors
from .atomic import write_atomically
from .offload_folder import read_offload_index

__all__ = ["OWNER_NAME", "check_owner", "write_owner"]

OWNER_NAME: Final = "owner.json"


def _identity(model: nn.Module, source: str) -> dict[str, str]:
    """What two models must share to share a folder: the class, every tensor's name and shape, and where the values come from."""
    tensors = sorted((name, list(tensor.shape)) for name, tensor in named_module_tensors(model, recurse=True, remove_non_persistent=True))
    return {
        "model": type(model).__name__,
        "tensors": hashlib.sha256(json.dumps(tensors).encode()).hexdigest(),
        "source": source,
    }


def check_owner(folder: str | Path, model: nn.Module, source: str | None = None) -> bool:
    """Whether `folder` already holds this model's weights, coming from `source`: a checkpoint's path, `""` for the model's own values, or
    None for either.

    False for a folder without an index. Raises `CheckpointError`, naming both, when the folder is another model's; a folder without a
    note (other libraries write none) is judged by the names and shapes in its index.
    """
    folder = Path(folder)
    if not (folder / OFFLOAD_INDEX_NAME).is_file():
        return False
    own = _identity(model, source or "")
    try:
        note = json.loads((folder / OWNER_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        shapes = {name: list(tensor.shape) for name, tensor in named_module_tensors(model, recurse=True)}
        _check_index(folder, shapes, own["model"])
        return True
    except ValueError as error:
        raise CheckpointError(f"{folder / OWNER_NAME}: not valid JSON ({error}). Delete the folder, or use another one.") from error
    theirs = note if isinstance(note, dict) else {}
    if own == theirs | ({"source": ""} if source is None else {}):
        return True
    mine = "" if source is None else f" from {source or 'its own values'}"
    raise CheckpointError(
        f"{folder}: this offload folder belongs to another model ({theirs.get('model')} from {theirs.get('source') or 'its own values'}; "
        f"this one is {own['model']}{mine}). Delete the folder, or use another one."
    )


def _check_index(folder: Path, shapes: Mapping[str, list[int]], model: str) -> None:
    index = read_offload_index(folder)
    strangers = [name for name, info in index.items() if name not in shapes or info.get("shape", shapes[name]) != shapes[name]]
    if strangers:
        raise CheckpointError(
            f"{folder}: this offload folder belongs to another model: {', '.join(strangers[:5])} in it are not tensors of this {model} "
            "or have other shapes. Delete the folder, or use another one."
        )


def write_owner(folder: str | Path, model: nn.Module, source: str = "") -> None:
    """Notes that `folder` is this model's from now on."""
    write_atomically(Path(folder) / OWNER_NAME, json.dumps(_identity(model, source), indent=2).encode())
