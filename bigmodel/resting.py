"""Where the offloaded weights of a model that is loaded already rest: as it was told, or in an offload folder, written now if need be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .device_map import device_for
from .devices import DeviceKey
from .dispatch import LazyTensor, MappingStore, as_store
from .errors import PlanError
from .loading import OffloadedWeightsLoader, fill_folder
from .modules import get_non_persistent_buffers, named_module_tensors
from .protocols import Store

__all__ = ["folder_store", "own_tensors", "store_for"]


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the model has registered and would save, under all names. (Packed layers save it under other names.)"""
    transient = get_non_persistent_buffers(model, recurse=True, fqns=True)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in transient}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def store_for(
    model: nn.Module,
    devices: Mapping[str, DeviceKey],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | Path | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
) -> Store | None:
    """Where the tensors mapped to "disk" rest (and those of `state_dict`): the given folder or index; written there now if need be."""
    names = [
        name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True) if device_for(name, devices) == "disk"
    ]
    if not names:
        return None if state_dict is None else as_store(state_dict)
    if offload_index is not None:
        return MappingStore(OffloadedWeightsLoader(state_dict=state_dict, save_folder=offload_dir, index=offload_index), kind="disk")
    if offload_dir is None:
        modules = ", ".join(name or "the whole model" for name, device in devices.items() if device == "disk")
        raise PlanError(
            "We need an `offload_dir` to dispatch this model according to this `device_map`, the following submodules need to be "
            f"offloaded: {modules}. Give a folder, or load with `load_checkpoint_and_dispatch`, which reads the checkpoint itself."
        )
    return folder_store(model, names, offload_dir, state_dict)


def folder_store(
    model: nn.Module, names: Collection[str], folder: str | Path, state_dict: Mapping[str, torch.Tensor] | None = None
) -> Store:
    """The offload folder as a store. The model's own values of the tensors `names` are written to it first, unless it holds them.

    Raises `CheckpointError` when the folder is another model's, or cannot be written.
    """
    own = own_tensors(model)
    here = {name: own[name] for name in names if name in own and (isinstance(own[name], LazyTensor) or not own[name].is_meta)}
    if here:
        fill_folder(folder, model, here)
    return MappingStore(OffloadedWeightsLoader(state_dict=state_dict, save_folder=folder), kind="disk")
