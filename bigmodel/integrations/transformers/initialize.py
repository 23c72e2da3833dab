"""Values that no checkpoint holds: buffers that are computed from the configuration, and weights that a model starts with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...modules import get_non_persistent_buffers, named_module_tensors, owner_of, tensor_aliases

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
    finished = [tensor for name, tensor in named_module_tensors(model, recurse=True) if name not in names]
    fresh: dict[int, torch.Tensor] = {}
    for name in names:
        buffer = model.get_buffer(name)
        if id(buffer) not in fresh:
            fresh[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
            _bytes(fresh[id(buffer)]).fill_(_UNTOUCHED_BYTE)
        set_tensor(model, name, fresh[id(buffer)])
    _run_initialization(model, finished)
    untouched = [name for name in names if _is_untouched(model.get_buffer(name))]
    return untouched + _plain_tensors_on_meta(model)


def initialize_missing(model: nn.Module, names: Collection[str]) -> None:
    """Gives the tensors `names`, which are on meta, memory on CPU and the values that the model's class starts training with.

    Draws from torch's global generator in the order in which transformers does.
    """
    fresh: dict[int, torch.Tensor] = {}
    for aliases in tensor_aliases(model, include_buffers=True).values():
        if not set(aliases) & set(names):
            continue
        owner, attribute = owner_of(model, aliases[0])
        old = getattr(owner, attribute)
        new = torch.empty(old.shape, dtype=old.dtype)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        fresh[id(new)] = new
        for alias in aliases:
            set_tensor(model, alias, new)
    _run_initialization(model, [tensor for _, tensor in named_module_tensors(model, recurse=True) if id(tensor) not in fresh])


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a parameter or buffer in the place of the one called `name`."""
    owner, attribute = owner_of(model, name)
    registry: dict[str, Any] = owner._parameters if attribute in owner._parameters else owner._buffers
    registry[attribute] = tensor


def _computed_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in computed]


def _run_initialization(model: Any, finished: Sequence[torch.Tensor]) -> None:
    """The model's own initialization, of everything but the tensors that are finished: transformers asks each for a mark."""
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for tensor in finished:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        model.initialize_weights()
    finally:
        # From now on the modules carry the mark. A parameter without attributes is cheaper to swap at every forward.
        for tensor in finished:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


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
