"""Files of models that tensor-parallel processes share, and their whole tensors under the names that the user's model has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ...constants import OPTIMIZER_NAME
from ...errors import CheckpointNotFoundError, MatchError, TrainingError
from ..training_files import file_name, read_plain, write_plain
from .fsdp_files import read_parts, write_parts
from .megatron_model import MegatronModel
from .megatron_names import Rule, as_it_is
from .megatron_parts import is_part, laid_out, part_of, whole_of

__all__ = [
    "WholeTensors",
    "load_parts_of_model",
    "load_parts_of_optimizer",
    "parts_of_model",
    "save_parts_of_model",
    "save_parts_of_optimizer",
]

FOLDERS: Final = {"model": "megatron_model", "optimizer": "megatron_optimizer"}
"""Folders of `torch.distributed.checkpoint`, under the names of megatron-core."""


class WholeTensors:
    """The tensors of a prepared model under the names of the user's model, one gathered at a time; all processes ask for the same.

    Args:
        model: prepared.
        mesh: the one-dimensional mesh of tensor-parallel processes.

    Attributes:
        shapes: a state dict of tensors without values; ties are one tensor.
    """

    def __init__(self, model: MegatronModel, mesh: Any):
        self._parameters = dict(model.gpt.named_parameters())
        self._mesh = mesh
        rules = [as_it_is(name, name) for name in self._parameters] if model.rules is None else model.rules
        self._joins = model.rules is None
        self._places: dict[str, tuple[Rule, int]] = {}
        self._kept: tuple[str, Sequence[torch.Tensor]] | None = None
        self.shapes: dict[str, torch.Tensor] = {}
        for rule in rules:
            parts = self._parts(rule, self._without_values(self._parameters[rule.name]), self._parameters[rule.name])
            for number, (source, part) in enumerate(zip(rule.sources, parts, strict=True)):
                self._places[source] = rule, number
                self.shapes[source] = part
        for alias, name in model.aliases.items():
            self._places[alias] = self._places[name]
            self.shapes[alias] = self.shapes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        """All values of a tensor."""
        rule, number = self._places[name]
        if self._kept is None or self._kept[0] != rule.name:
            parameter = self._parameters[rule.name]
            self._kept = rule.name, self._parts(rule, whole_of(parameter, parameter, self._mesh), parameter)
        return self._kept[1][number]

    def _parts(self, rule: Rule, whole: torch.Tensor, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._joins and is_part(parameter):  # as one process of megatron-core has it
            dimension = laid_out(parameter, parameter)[1]
            whole = whole.flatten(dimension - 1, dimension) if whole.dim() > parameter.dim() else whole
        return [part.contiguous() for part in rule.parts(whole)]

    def _without_values(self, parameter: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        if not is_part(parameter):
            return empty
        shape = list(laid_out(parameter, empty)[0].shape)
        shape[laid_out(parameter, empty)[1]] *= self._mesh.size()
        return torch.empty(shape, dtype=parameter.dtype, device="meta")


def parts_of_model(model: MegatronModel, mesh: Any) -> dict[str, torch.Tensor]:
    """Every parameter, those that processes share as DTensors in the memory of the parameters."""
    return {name: part_of(parameter, parameter.detach(), mesh) for name, parameter in model.gpt.named_parameters()}


def save_parts_of_model(state: dict[str, Any], index: int, folder: Path) -> None:
    """Every process writes its part."""
    write_parts({"model": state}, folder / file_name(FOLDERS["model"], index, ""))


def load_parts_of_model(model: MegatronModel, index: int, folder: Path, mesh: Any, strict: bool) -> None:
    """Fills a model in place, whatever the degrees of the processes that wrote."""
    read_parts({"model": parts_of_model(model, mesh)}, _present(folder / file_name(FOLDERS["model"], index, "")), strict)


def save_parts_of_optimizer(
    models: Sequence[MegatronModel], optimizer: torch.optim.Optimizer, index: int, folder: Path, mesh: Any, writes: bool
) -> None:
    """Every process writes its part of a torch optimizer's states; who `writes`, the rest, in a file beside the folder."""
    named = _names(models, optimizer)
    saved = optimizer.state_dict()
    parts: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for number, values in saved["state"].items():
        name, parameter = named[number]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                parts[f"{name}.{key}"] = part_of(parameter, value, mesh)
                value = torch.empty(0, dtype=value.dtype)
            states.setdefault(name, {})[key] = value
    write_parts({"optimizer": parts}, folder / file_name(FOLDERS["optimizer"], index, ""))
    groups = [{**group, "params": [named[number][0] for number in group["params"]]} for group in saved["param_groups"]]
    if writes:
        small = folder / file_name(OPTIMIZER_NAME, index, ".bin")
        write_plain({"state": states, "param_groups": groups, "parts": sorted(parts)}, small, f"optimizer {index}")


def load_parts_of_optimizer(models: Sequence[MegatronModel], optimizer: torch.optim.Optimizer, index: int, folder: Path, mesh: Any) -> None:
    """Fills an optimizer, whatever the degrees of the processes that wrote. Raises `MatchError` where it trains other parameters."""
    named = _names(models, optimizer)
    saved = read_plain(folder / file_name(OPTIMIZER_NAME, index, ".bin"), f"optimizer {index}")
    numbers = {name: number for number, (name, _) in named.items()}
    of_parts = set(saved["parts"])
    there = [name for group in saved["param_groups"] for name in group["params"]]
    if sorted(there) != sorted(numbers):
        strange = sorted(set(there) ^ set(numbers))
        raise MatchError(f"{folder}: optimizer {index} was saved for other parameters than it has: {', '.join(strange[:5])}.")
    parts: dict[str, torch.Tensor] = {}
    for name, values in saved["state"].items():
        parameter = named[numbers[name]][1]
        for key, value in values.items():
            if f"{name}.{key}" in of_parts:
                values[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                parts[f"{name}.{key}"] = part_of(parameter, values[key], mesh)
    read_parts({"optimizer": parts}, _present(folder / file_name(FOLDERS["optimizer"], index, "")), True)
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]]
    optimizer.load_state_dict({"state": {numbers[name]: values for name, values in saved["state"].items()}, "param_groups": groups})


def _names(models: Sequence[MegatronModel], optimizer: torch.optim.Optimizer) -> dict[int, tuple[str, torch.nn.Parameter]]:
    """Of each parameter of the optimizer, by its number in the state dict, the name, which begins with its model's number, and itself."""
    known = {
        id(parameter): (f"{number}.{name}", parameter)
        for number, model in enumerate(models)
        for name, parameter in model.gpt.named_parameters()
    }
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = sum(id(parameter) not in known for parameter in trained)
    if lacking:
        raise TrainingError(f"The optimizer has {lacking} parameters that no prepared model has: prepare their model too.")
    return {number: known[id(parameter)] for number, parameter in enumerate(trained)}


def _present(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"{folder.parent}: there is no folder {folder.name}. Prepare as many objects as were saved with a MegatronLMPlugin, in the "
            "same order."
        )
    return folder
