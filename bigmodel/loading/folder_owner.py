"""Whose an offload folder is: a note beside its index, so that no model runs with another one's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import nn

from ..atomic import folder_to_write, write_atomically
from ..constants import OFFLOAD_INDEX_NAME
from ..errors import CheckpointError
from ..modules import named_module_tensors
from .offload_folder import OffloadedWeightsLoader, offload_state_dict, read_offload_index

__all__ = ["OWNER_NAME", "check_owner", "fill_folder", "write_owner"]

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
    only_tensors = own["model"] == theirs.get("model") and source in (None, theirs.get("source"))
    difference = "tensors of other names or shapes: " if only_tensors else ""
    mine = "" if source is None else f" from {source or 'its own values'}"
    whose = f"{theirs.get('model')} from {theirs.get('source') or 'its own values'}"
    raise CheckpointError(
        f"{folder}: this offload folder belongs to another model ({difference}{whose}; this one is {own['model']}{mine}). "
        "Delete the folder, or use another one."
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


def fill_folder(folder: str | Path, model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Writes `values`, the model's own, to `folder`, and notes whose they are. What a folder of this model holds already is left alone.

    Raises `CheckpointError`, with nothing written, when the folder is another model's, holds other values, or cannot be written.
    """
    folder = Path(folder)
    with folder_to_write(folder, [*(f"{name}.dat" for name in values), OFFLOAD_INDEX_NAME, OWNER_NAME]):
        if check_owner(folder, model):
            _keep_or_refuse(folder, values)
        else:
            offload_state_dict(folder, values)
            write_owner(folder, model)


def _keep_or_refuse(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Adds the values that the folder lacks, and refuses one that holds others: another model may be reading that folder right now."""
    kept = OffloadedWeightsLoader(save_folder=folder)
    for name, value in values.items():
        if name in kept.all_keys and not torch.equal(_bytes_of(kept[name]), _bytes_of(value)):
            raise CheckpointError(
                f"{folder}: this offload folder holds other values of {name} than the model. Delete the folder, or use another one."
            )
    missing = {name: value for name, value in values.items() if name not in kept.all_keys}
    if missing:
        offload_state_dict(folder, missing)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN equals itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
