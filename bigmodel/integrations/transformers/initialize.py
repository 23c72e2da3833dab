"""Values that no checkpoint holds: buffers that are computed from the configuration, and weights that a model starts with."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ...modules import get_non_persistent_buffers, named_module_tensors, owner_of

__all__ = ["compute_buffers", "initialize_missing", "set_tensor"]

# Memory that is to be computed is filled with this byte; where all of it is still there afterwards, nobody has computed it.
_UNTOUCHED_BYTE = 0xA5


def compute_buffers(model: nn.Module) -> list[str]:
    """Computes the buffers that are not part of the state dict (rotary frequencies, position ids), which are on meta, on CPU.

    transformers' models do it in their `initialize_weights`, which leaves tensors alone that are marked as initialized. Returns the names
    of what that has not computed, and of tensors on meta that are neither parameters nor buffers: they have to come from the
    constructor.
    """
    names = [name for name, buffer in _computed_buffers(model) if buffer.is_meta]
    _mark(tensor for _, tensor in named_module_tensors(model, recurse=True))
    fresh: dict[int, torch.Tensor] = {}
    for name in names:
        buffer = model.get_buffer(name)
        if id(buffer) not in fresh:
            fresh[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
            _bytes(fresh[id(buffer)]).fill_(_UNTOUCHED_BYTE)
        set_tensor(model, name, fresh[id(buffer)])
    _run_initialization(model)
    untouched = [name for name in names if _is_untouched(model.get_buffer(name))]
    return untouched + _plain_tensors_on_meta(model)


def initialize_missing(model: nn.Module, names: Collection[str]) -> None:
    """Gives the tensors `names`, which are on meta, memory on CPU and the values that the model's class starts training with.

    Draws from torch's global generator in the order in which transformers does.
    """
    _mark(tensor for _, tensor in named_module_tensors(model, recurse=True))
    for name in names:
        old = model.get_parameter(name) if _is_parameter(model, name) else model.get_buffer(name)
        fresh = torch.empty(old.shape, dtype=old.dtype)
        set_tensor(model, name, nn.Parameter(fresh, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else fresh)
    _run_initialization(model)
    _mark(tensor for _, tensor in named_module_tensors(model, recurse=True))


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a parameter or buffer in the place of the one called `name`."""
    owner, attribute = owner_of(model, name)
    registry: dict[str, Any] = owner._parameters if attribute in owner._parameters else owner._buffers
    registry[attribute] = tensor


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, attribute = owner_of(model, name)
    return attribute in owner._parameters


def _computed_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in computed]


def _run_initialization(model: Any) -> None:
    """The model's own initialization, of everything that is not marked; modules lose the mark that keeps them from being visited."""
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()


def _mark(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _is_untouched(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool((_bytes(tensor) == _UNTOUCHED_BYTE).all())


def _plain_tensors_on_meta(model: nn.Module) -> list[str]:
    """Tensors on meta that are attributes of a module without being registered: nobody could ever fill them."""
    names = []
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                names.append(f"{path}.{attribute}" if path else attribute)
    return names
