"""A copy of a model that has its code and its shapes but no data, cut down to a few of its layers: for running it without its weights."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..modules import find_blocks

__all__ = ["Kind", "layer_kinds", "meta_copy"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

_LEFT_OUT = object()
"""Stands in a copy for what is taken out of it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of one list that are alike: same class, same shapes, same place in every list of the configuration."""

    path: str
    """The list's name."""
    indices: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """Names of the layers, in order."""
        return [f"{self.path}.{index}" for index in self.indices]


def layer_kinds(model: nn.Module) -> list[Kind]:
    """The layers of all lists of blocks in `model`, sorted into kinds; none where it has no such lists."""
    blocks = set(find_blocks(model))
    kinds: list[Kind] = []
    configs = _configs(model)
    for path in dict.fromkeys(block.rpartition(".")[0] for block in blocks):
        layers = model.get_submodule(path)
        if not isinstance(layers, nn.ModuleList) or any(f"{path}.{key}" not in blocks for key in layers._modules):
            continue
        groups: dict[tuple[object, ...], list[int]] = {}
        listed = [values for config in configs for values in _lists(config, len(layers)).values()]
        for index, layer in enumerate(layers):
            signature = (type(layer), *_shapes(layer), *(repr(values[index]) for values in listed))
            groups.setdefault(signature, []).append(index)
        kinds += [Kind(path, tuple(indices)) for indices in groups.values()]
    return kinds


def _shapes(module: nn.Module) -> Iterator[object]:
    for name, child in module._modules.items():
        if child is not None:
            yield name
            yield from _shapes(child)
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            yield name, None if tensor is None else tensor.shape


def _configs(model: nn.Module) -> list[Any]:
    """The distinct configurations that modules hold, and those inside of them; objects with attributes only."""
    found: dict[int, Any] = {}
    stack = [module.__dict__["config"] for module in model.modules() if "config" in module.__dict__]
    while stack:
        config = stack.pop()
        if id(config) in found or not hasattr(config, "to_dict"):
            continue
        found[id(config)] = config
        stack += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return list(found.values())


def _lists(config: Any, length: int) -> dict[str, Sequence[Any]]:
    """The lists that say something of each of `length` layers; lists of different values count layers, or something else."""
    found = {name: values for name, values in vars(config).items() if isinstance(values, list | tuple) and len(values) == length}
    return {name: values for name, values in found.items() if len({repr(value) for value in values}) < length}


class _WithoutData(TorchFunctionMode):
    """Deep copies of tensors have their shape, and no data."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=False)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def meta_copy(model: nn.Module, dtype: torch.dtype | None, keep: Mapping[str, Sequence[int]]) -> nn.Module:
    """A copy of `model` on meta, in evaluation mode and without hooks or dispatch, that shares nothing with it. No data is read.

    Floating parameters and persistent buffers have `dtype`, if one is given. Of the lists of layers that `keep` names only these layers
    are left, in order. Where the configuration lists its layers, their `layer_idx` and these lists are those of a model that has no others.
    """
    memo: dict[int, Any] = {}
    for path, indices in keep.items():
        layers = model.get_submodule(path)
        memo.update((id(layer), nn.Identity()) for index, layer in enumerate(layers.children()) if index not in set(indices))
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) in memo:
            continue
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(_empty(parameter, dtype), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = _empty(buffer, None if name in module._non_persistent_buffers_set else dtype)
        for hooks in _HOOKS:
            memo[id(module.__dict__[hooks])] = OrderedDict()
        memo.update((id(value), _LEFT_OUT) for name, value in module.__dict__.items() if _is_of_a_dispatch(module, name, value))
        stack += [child for child in module._modules.values() if child is not None]
    with _WithoutData():
        copied: nn.Module = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name in [name for name, value in module.__dict__.items() if value is _LEFT_OUT]:
            del module.__dict__[name]
    configs = _configs(copied)
    for path, indices in keep.items():
        _cut(copied, path, indices, configs)
    return copied.eval()


def _is_of_a_dispatch(module: nn.Module, name: str, value: object) -> bool:
    """Whether the attribute is what a dispatch put on a module: a hook (`_hf_hook`, as libraries agree), methods in place of its own."""
    if "_hf_hook" not in module.__dict__ or value is None:
        return False
    return name in ("_hf_hook", "_old_forward") or name.startswith("_bigmodel_") or isinstance(value, functools.partial)


def _empty(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=wanted, device="meta")


def _cut(model: nn.Module, path: str, indices: Sequence[int], configs: Sequence[Any]) -> None:
    """Leaves these layers of the list at `path`."""
    layers = model.get_submodule(path)
    all_layers = list(layers._modules.values())
    layers._modules = {str(position): all_layers[index] for position, index in enumerate(indices)}
    if not any(_lists(config, len(all_layers)) for config in configs):
        return  # the configuration tells of each layer by its number
    for position, index in enumerate(indices):
        for module in layers._modules[str(position)].modules():  # type: ignore[union-attr]  # blocks are there
            if module.__dict__.get("layer_idx") == index:
                module.__dict__["layer_idx"] = position
    for config in configs:
        for name, values in _lists(config, len(all_layers)).items():
            config.__dict__[name] = [values[index] for index in indices]
        if config.__dict__.get("num_hidden_layers") == len(all_layers):
            config.__dict__["num_hidden_layers"] = len(indices)
