"""Which modules of a model are sharded as units of their own, gathered and freed together, and which are left alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from ...errors import TrainingError
from ...modules import runs_itself
from ...text import kind_text
from .fsdp import FullyShardedDataParallelPlugin

__all__ = ["ignored_modules", "owners_of", "units_of"]


def owners_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """For the identity of each parameter, the modules that hold it, and its key there."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, key))
    return owners


def ignored_modules(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """The modules that the plugin leaves out, without those inside of them. Raises `TrainingError` where it names none of this model."""
    wanted = plugin.ignored_modules
    if wanted is None:
        return []
    if isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise TrainingError(f"ignored_modules={wanted!r} is no regular expression: {error}.") from error
        found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not found:
            raise TrainingError(f"ignored_modules={wanted!r} matches the whole name of no module of {type(model).__name__}.")
    else:
        there = {id(module) for module in model.modules()}
        found = list(wanted)
        strangers = [type(module).__name__ for module in found if id(module) not in there]
        if strangers:
            raise TrainingError(f"ignored_modules holds {', '.join(strangers)}, which {type(model).__name__} does not hold.")
    if any(module is model for module in found):
        raise TrainingError(f"ignored_modules holds the whole model, {kind_text(model)}: nothing is left to shard.")
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def units_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: list[nn.Module]) -> list[nn.Module]:
    """The modules below `model` that the plugin's policy wraps, inner ones first.

    A module whose parameters are tied to others outside of it belongs to the unit that holds them all: one alone would be sharded apart
    from its ties.
    """
    chosen = copy.copy(plugin)  # a policy that is made for one model is not another's
    chosen.set_auto_wrap_policy(model)
    if chosen.auto_wrap_policy is None:
        return []
    walk = _Walk(model, chosen.auto_wrap_policy, ignored)  # type: ignore[arg-type]
    walk.visit(model)
    return walk.units


class _Walk:
    """Asks a policy of `torch.distributed.fsdp.wrap` about every module, as version 1 does."""

    def __init__(self, model: nn.Module, policy: Callable[..., Any], ignored: list[nn.Module]):
        self.units: list[nn.Module] = []
        self._model = model
        self._policy = policy
        self._left_out = {id(part) for module in ignored for part in module.modules()}
        self._ignored = {id(parameter) for module in ignored for parameter in module.parameters()}
        self._owners = owners_of(model)
        self._seen: set[int] = set()

    def visit(self, module: nn.Module) -> int:
        """Returns how many numbers are in parameters below `module` that a unit holds already."""
        self._seen.add(id(module))
        size = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in self._ignored)
        held = 0
        if self._policy(module=module, recurse=True, nonwrapped_numel=size):
            for child in module.children():
                if id(child) not in self._seen and id(child) not in self._left_out:
                    held += self.visit(child)
        if module is self._model or not runs_itself(module) or size == held or not self._holds_its_ties(module):
            return held
        if not self._policy(module=module, recurse=False, nonwrapped_numel=size - held):
            return held
        self.units.append(module)
        return size

    def _holds_its_ties(self, module: nn.Module) -> bool:
        inside = {id(part) for part in module.modules()}
        return all(id(owner) in inside for parameter in module.parameters() for owner, _ in self._owners[id(parameter)])
