"""A tree to plan from whatever is known of a model: its code, its configuration, or the headers of a checkpoint that is not here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from .errors import BigModelError, CheckpointError, CheckpointNotFoundError, PlanError
from .header_dump import read_dump, specs_in
from .integrations.transformers import (
    build_empty,
    config_folder,
    is_config,
    is_gguf,
    load_config,
    local_header,
    own_quantization,
    resolve_dtype,
    single_gguf,
)
from .loading import Checkpoint
from .loading.location import HubRepository, RemoteFile, located
from .planning import skeleton
from .protocols import TensorSpec
from .text import kind_text

__all__ = ["Tree", "Wanted", "find_tree"]

SAME_SIZE: Final = 2
"""How many times as many elements as its configuration describes a checkpoint may have: tied weights are stored once or twice."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a model of transformers is to be built."""

    dtype: torch.dtype | None = None
    """None: what the configuration, or the checkpoint, says."""
    names_dtype: bool = False
    """Whether loading will use a dtype that is given, which may be one that no model can be built in."""
    model_class: Any = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """A module tree to plan."""

    model: nn.Module
    name: str = ""
    """What to call it where its class says nothing."""
    is_built: bool = False
    """Built as it was wanted: in the wanted dtype, what the model keeps in float32 left out."""
    notes: tuple[str, ...] = ()


def find_tree(source: Any, wanted: Wanted) -> Tree:
    """The tree of a module, a configuration, a checkpoint's place, or a dump of headers; see `bigmodel.plan`.

    Raises `PlanError` for anything else, and the errors of reading what it is.
    """
    if isinstance(source, nn.Module):
        return Tree(source)
    if isinstance(source, Mapping):
        return _of_dump(source, "The header dump")
    if isinstance(source, str) and not source:
        raise PlanError("The name of the model is empty. Give the path of a checkpoint, or a repository on the hub ('owner/name').")
    if isinstance(source, str | os.PathLike):
        return _of_place(located(source), wanted)
    if is_config(source):
        return _built(source, wanted, None)
    raise PlanError(
        f"A {type(source).__name__} cannot be planned. Give a module, a configuration of transformers, the path of a checkpoint, a "
        "repository on the hub ('owner/name'), or a dump of headers."
    )


def _of_dump(dump: Any, source: str) -> Tree:
    specs = specs_in(dump, source)
    location, config = (dump.get(key) if isinstance(dump.get("tensors"), Mapping) else None for key in ("location", "config"))
    return _of_specs(specs, str(location or source), config if isinstance(config, Mapping) else None)


def _of_specs(specs: Mapping[str, TensorSpec], name: str, config: Mapping[str, Any] | None, *notes: str) -> Tree:
    if not specs:
        raise CheckpointError(f"{name}: holds no tensors.")
    model: Any = skeleton(specs)
    if config is not None:
        model.config = config
    headers_only = "Planned from the headers of the checkpoint alone: what the model's code computes is not counted."
    return Tree(model, name, notes=(*notes, headers_only))


def _of_place(place: Path | RemoteFile | HubRepository, wanted: Wanted) -> Tree:
    """What the configuration beside a checkpoint describes; where that is not to be had, what the checkpoint's headers say."""
    if isinstance(place, Path) and _is_dump(place):
        return _of_dump(read_dump(place), str(place))
    folder = _config_folder(place, wanted)
    if folder is None:
        return _of_gguf(place, wanted) or _of_headers(place, None)
    config = _read_config(folder / "config.json")
    try:
        return _of_config(place, folder, wanted)
    except _NoUseError as reason:
        try:
            return _of_headers(place, config, str(reason))
        except CheckpointNotFoundError:  # there is nothing but the configuration
            cause = reason.__cause__
            raise (cause if isinstance(cause, BigModelError) else PlanError(f"{place}: {reason}")) from None


def _of_gguf(place: Path | RemoteFile | HubRepository, wanted: Wanted) -> Tree | None:
    """The model that a GGUF file's own configuration describes, or what its headers say where transformers does not know such models.

    None where the checkpoint is none, or is not all in one file.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(place, Path):
            file = single_gguf(place)
        else:
            entries = _opened(place).entries
            is_one = is_gguf(entries) and len({entry.file for entry in entries.values()}) == 1
            file = stack.enter_context(local_header(entries)) if is_one else None
        if file is None:
            return None
        try:
            return _built(load_config(file), wanted, place)
        # Code of transformers that reads another kind of file than it was made for fails in its own words.
        except Exception as error:
            return _of_headers(place, None, f"Its own configuration was of no use ({' '.join(str(error).split())[:200]}).")


def _is_dump(file: Path) -> bool:
    return file.suffix == ".json" and not file.name.endswith(".index.json") and file.name != "config.json" and file.is_file()


def _config_folder(place: Path | RemoteFile | HubRepository, wanted: Wanted) -> Path | None:
    """The folder with the `config.json` that belongs to a checkpoint; None where there is none."""
    if isinstance(place, HubRepository):
        return config_folder(place, trust_remote_code=wanted.trust_remote_code)
    if isinstance(place, RemoteFile):
        return None
    folder = place if place.is_dir() else place.parent
    return folder if (folder / "config.json").is_file() else None


def _opened(place: Path | RemoteFile | HubRepository) -> Checkpoint:
    if isinstance(place, Path):
        return Checkpoint.open(place.parent if place.name == "config.json" else place)
    return Checkpoint.open(place.url if isinstance(place, RemoteFile) else str(place))


def _of_headers(place: Path | RemoteFile | HubRepository, config: Mapping[str, Any] | None, *notes: str) -> Tree:
    specs = {name: TensorSpec(entry.shape, entry.dtype) for name, entry in _opened(place).entries.items()}
    return _of_specs(specs, place.name or str(place), config, *notes)


def _read_config(file: Path) -> Mapping[str, Any]:
    config = read_dump(file)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{file}: is not a configuration (a JSON object).")
    return config


class _NoUseError(Exception):
    """Why a configuration does not say what there is."""


def _of_config(place: Path | RemoteFile | HubRepository, folder: Path, wanted: Wanted) -> Tree:
    try:
        config = load_config(folder, trust_remote_code=wanted.trust_remote_code)
        if _is_packed(folder, config):
            raise _NoUseError("The checkpoint is quantized: its tensors are counted as they are stored.")
        tree = _built(config, wanted, place)
    except _NoUseError:
        raise
    # Code of a model from elsewhere, or a configuration of another version, fails in its own words.
    except Exception as error:
        raise _NoUseError(f"Its config.json was of no use ({' '.join(str(error).split())[:200]}).") from error
    if isinstance(place, Path) and place.is_file() and place.name != "config.json":
        _refuse_other_size(tree.model, Checkpoint.open(place))
    return tree


def _is_packed(folder: Path, config: Any) -> bool:
    """Whether a checkpoint fills packed layers, and not a floating model with the values that its packed weights stand for."""
    try:
        return own_quantization(folder, config) is not None
    except CheckpointError:  # of a kind that cannot be loaded; how large it is can be said
        return True


def _built(config: Any, wanted: Wanted, place: Path | RemoteFile | HubRepository | None) -> Tree:
    """The model of a configuration of transformers, with notes on what it leaves open. `place` is where its checkpoint may be."""
    notes: list[str] = []
    try:
        dtype = resolve_dtype(wanted.dtype, config, None if place is None else lambda: _opened(place))
        is_told = place is not None or wanted.names_dtype or getattr(config, "dtype", None) is not None
    except CheckpointNotFoundError:  # there is nothing but the configuration
        dtype, is_told = resolve_dtype(wanted.dtype, config, None), wanted.names_dtype
    model = build_empty(config, dtype=dtype, model_class=wanted.model_class, trust_remote_code=wanted.trust_remote_code)
    if wanted.model_class is None and not getattr(config, "architectures", None):
        notes.append(
            f"The configuration names no architecture: this is {kind_text(model)}, without a head. Give model_class, such as "
            "'AutoModelForCausalLM', or name one in the configuration's 'architectures'."
        )
    if not is_told:
        name = str(dtype).removeprefix("torch.")
        notes.append(f"The configuration names no dtype: its weights are planned in {name}. Give the dtype that loading will use.")
    return Tree(model, is_built=True, notes=tuple(notes))


def _refuse_other_size(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuses the configuration of another model, as beside a single shard or an adapter."""
    described = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(entry.numel for entry in checkpoint.entries.values())
    if not described <= stored * SAME_SIZE <= described * SAME_SIZE**2:
        raise _NoUseError(
            f"The config.json beside it describes {kind_text(model)} of {described:,} parameters, and the file holds {stored:,}."
        )
