"""Compiling a model, whole or by regions: its blocks one by one, so that those of one class share what was compiled."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..dispatch import ModuleReference, OwnForward
from ..errors import TrainingError
from ..modules import find_blocks, runs_itself
from .configuration import TorchDynamoPlugin
from .enums import DynamoBackend

__all__ = ["compile_in_place", "compile_model", "compile_regions", "has_compiled_regions", "is_compiled_module"]


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """The model as the plugin compiles it; the model itself where the backend is `"NO"`, or where it was compiled, whole or by regions."""
    if plugin.backend == DynamoBackend.NO or is_compiled_module(model) or "_orig_mod" in model.__dict__:
        return model
    if plugin.use_regional_compilation:
        return compile_regions(model, **plugin.to_kwargs())
    return torch.compile(model, **plugin.to_kwargs())  # type: ignore[return-value]


def compile_in_place(model: nn.Module, plugin: TorchDynamoPlugin | None, regions: Iterable[nn.Module]) -> None:
    """Compiles forwards as the plugin says, of the model or, with regional compilation, of `regions`; modules and their names stay."""
    if plugin is None or plugin.backend == DynamoBackend.NO:
        return
    chosen = list(regions) if plugin.use_regional_compilation else []
    for module in chosen or [model]:
        module.compile(**plugin.to_kwargs())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """The model with each block compiled by itself, which takes a fraction of the time that the whole model takes.

    Blocks are what `find_blocks` finds: those of one class run the same compiled code, and what stands beside them (embedding, head) is
    compiled module by module. A model without blocks is compiled as a whole.

    Args:
        module: stays as it is.
        compile_kwargs: arguments of `torch.compile`.

    Returns a copy of the modules above the blocks, with the same tensors; `compiled._orig_mod` is `module`, and so in every copied module.
    Raises `TrainingError` where a module above the blocks has a `forward` of its own making that a copy cannot have.
    """
    blocks = find_blocks(module)
    within = {name[:end] for name in blocks for end in _path_ends(name)}
    copied = {id(module.get_submodule(name)) for name in within}
    whole = {id(module.get_submodule(name)) for name in blocks}
    # torch runs all its own classes through one function, whose compiled versions are limited to a few. Blocks need few, being alike.
    can_isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # not before torch 2.13
    apart = {"isolate_recompiles": True, **compile_kwargs} if can_isolate else compile_kwargs
    made: dict[int, nn.Module] = {}

    def compiled(part: nn.Module) -> nn.Module:
        if id(part) not in made:
            # A list has no forward: nothing of it could be compiled, and it would lose its length and indices.
            if id(part) not in whole and (id(part) in copied or not runs_itself(part)):
                made[id(part)] = copy(part)
            else:
                made[id(part)] = torch.compile(part, **(compile_kwargs if id(part) in whole else apart))  # type: ignore[assignment]
        return made[id(part)]

    def copy(part: nn.Module) -> nn.Module:
        new = type(part).__new__(type(part))
        new.__dict__.update({name: _rebound(value, part, new) for name, value in part.__dict__.items()})
        if "forward" in part.__dict__ and new.__dict__["forward"] is part.__dict__["forward"]:
            raise TrainingError(
                f"The forward of this {type(part).__name__} was replaced by {part.__dict__['forward']!r}, which would go on calling the "
                "blocks that are not compiled. Compile the model first, then wrap its forward."
            )
        new.__dict__["_modules"] = {name: None if child is None else compiled(child) for name, child in part._modules.items()}
        new.__dict__["_orig_mod"] = part
        return new

    return compiled(module)


def _path_ends(name: str) -> list[int]:
    """Where the names of the modules above `name` end in it, the root's first."""
    return [0, *(position for position, letter in enumerate(name) if letter == ".")]


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """`value` with `new` in the place of `old`: for a method of it, a reference to it, or a function with one of these as an argument."""
    if isinstance(value, MethodType) and value.__self__ is old:
        return MethodType(value.__func__, new)
    if isinstance(value, ModuleReference) and value() is old:
        return ModuleReference(new)
    if isinstance(value, OwnForward) and value.__self__ is old:
        return OwnForward(value.__func__, new)
    if isinstance(value, functools.partial):
        arguments = [new if each is old else _rebound(each, old, new) for each in value.args]
        if any(now is not before for now, before in zip(arguments, value.args, strict=True)):
            bound = functools.partial(value.func, *arguments, **value.keywords)
            bound.__dict__.update({name: _rebound(each, old, new) for name, each in value.__dict__.items()})
            return bound
    return value


def is_compiled_module(module: nn.Module) -> bool:
    """Whether the module is what `torch.compile` makes of one."""
    # Importing the compiler takes seconds; nothing is compiled where nobody has.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether the module, or one that it holds, is what `torch.compile` makes of one."""
    return any(map(is_compiled_module, module.modules()))
