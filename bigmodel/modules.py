"""Facts about module trees that planning, loading and dispatch all need: names of tensors, owners, ties, persistence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__ = [
    "find_tied_parameters",
    "get_non_persistent_buffers",
    "named_module_tensors",
    "owner_of",
    "tensor_aliases",
]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor `name` directly, and the tensor's own name there. Raises AttributeError."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with their names; a tensor registered twice comes once. The module is not changed."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    skipped = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in skipped:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that are not part of the state dict: bare names, or with `fqns` their full names below `module`."""
    names: set[str] = set()
    for path, child in module.named_modules() if recurse else [("", module)]:
        prefix = f"{path}." if fqns and path else ""
        names |= {prefix + name for name in child._non_persistent_buffers_set}
    return names


def tensor_aliases(model: nn.Module, *, include_buffers: bool = False) -> dict[str, list[str]]:
    """For every distinct tensor, under its first name, all names under which the very same object is registered (first one included)."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    pairs: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
    if include_buffers:
        pairs += list(model.named_buffers(remove_duplicate=False))
    for name, tensor in pairs:
        aliases.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return aliases


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Groups of names that share one parameter object, each sorted, in the order of the model; `[]` without ties.

    Only identity counts: two parameters that share memory but are different objects are not tied.
    """
    return [sorted(names) for names in tensor_aliases(model).values() if len(names) > 1]
