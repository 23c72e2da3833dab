"""What each item of a plan computes and moves in a step: the stages that the cost model adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..modules import reads_rows_only
from .cost import Run, Stage
from .items import Inventory, Item, Unit
from .sizes import DtypeLike
from .solver import Assignment

__all__ = ["run_of", "stages_of"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "num_selected_experts")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


def run_of(model: nn.Module, dtype: DtypeLike | None, batch: int) -> Run:
    """The arithmetic of a run: its dtype is the planned one where that is a floating dtype of torch, else that of most of the weights.

    Experts and widths are read from the model's config, where it has one.
    """
    config = _config(model)
    arithmetic = _floating(dtype) or _usual_dtype(model)
    experts, each = _number(config, _EXPERTS), _number(config, _EXPERTS_PER_TOKEN)
    if not (experts and each and each <= experts):
        experts = each = 0
    return Run(str(arithmetic).removeprefix("torch."), arithmetic.itemsize, batch, experts, each, _number(config, _HIDDEN))


def stages_of(
    model: nn.Module,
    inventory: Inventory,
    units: Sequence[Unit],
    assignment: Assignment,
    run: Run,
    *,
    offload_buffers: bool,
) -> list[Stage]:
    """One stage for every item, in the order of the model.

    Every parameter of two dimensions or more is a matrix that each token is multiplied with once; embeddings that are only looked up are
    none. The routed experts are the modules of a `ModuleList` of as many modules, and the parameters of three dimensions whose first one
    is as long, as the config says experts (`num_experts_per_tok` of them for a token).
    """
    stores = {"disk"} if assignment.main == "cpu" else {"cpu", "disk"}
    places = {item.name: (place, unit) for unit, place in zip(units, assignment.places, strict=True) for item in unit.items}
    tensors: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    modules = dict(model.named_modules(remove_duplicate=False))
    attention_width = _attention_width(model)
    stages = []
    for item in inventory.items:
        place, unit = places[item.name]
        runs_on = assignment.main if place in stores else place
        counted = _counted(modules.get(item.name), inventory, run)
        away = place in stores
        stages.append(
            Stage(
                item.name,
                runs_on,
                place,
                counted.weights,
                counted.weight_bytes,
                counted.expert_weights,
                counted.expert_bytes,
                _moved_bytes(item, inventory, offload_buffers=offload_buffers) if away else 0,
                counted.row_bytes if away else 0,
                counted.activation_width,
                attention_width if item.is_block else 0,
                unit.state_bytes if item.is_block else 0,
                counted.calls,
                sum(tensors[key].nbytes for key in item.tensors if inventory.buffers.get(key, True)),
                sum(inventory.nbytes[key] for key in item.tensors if inventory.buffers.get(key, True)),
            )
        )
    return stages


@dataclass(slots=True)
class _Counts:
    weights: int = 0
    weight_bytes: int = 0
    expert_weights: int = 0
    expert_bytes: int = 0
    row_bytes: int = 0
    activation_width: int = 0
    calls: int = 0


def _counted(module: nn.Module | None, inventory: Inventory, run: Run) -> _Counts:
    """What an item computes; tensors that an inner module holds itself (no module of that name) are not multiplied with."""
    counts = _Counts()
    if module is None:
        return counts
    stack = [(module, False)]
    while stack:
        current, in_expert = stack.pop()
        is_list = isinstance(current, nn.ModuleList)
        counts.calls += not is_list and not in_expert
        if reads_rows_only(current):
            table = current._parameters["weight"]
            if table is not None and id(table) in inventory.row_tables:
                counts.row_bytes += inventory.nbytes[id(table)] // max(1, table.shape[0])
            continue
        for parameter in current._parameters.values():
            if parameter is not None and parameter.dim() >= 2:
                _count(counts, parameter, inventory.nbytes[id(parameter)], run, in_expert=in_expert)
        inside = in_expert or (is_list and run.experts > 0 and len(current._modules) == run.experts)
        stack += [(child, inside) for child in current._modules.values() if child is not None]
    return counts


def _count(counts: _Counts, parameter: torch.Tensor, nbytes: int, run: Run, *, in_expert: bool) -> None:
    shape = parameter.shape
    is_stack = parameter.dim() == 3 and run.experts > 0 and shape[0] == run.experts
    if in_expert or is_stack:
        counts.expert_weights += parameter.numel()
        counts.expert_bytes += nbytes
        width = shape[1] + shape[2] if is_stack else shape[0] + shape[1]
        # In a list of experts every one of them comes here; in a stack all come at once.
        counts.activation_width += width * run.experts_per_token // (1 if is_stack else run.experts)
    else:
        counts.weights += parameter.numel()
        counts.weight_bytes += nbytes
        counts.activation_width += shape[0] + shape[1]


def _moved_bytes(item: Item, inventory: Inventory, *, offload_buffers: bool) -> int:
    buffers = inventory.buffers
    return sum(
        inventory.nbytes[key]
        for key in item.tensors
        if key not in inventory.row_tables and (key not in buffers or (offload_buffers and buffers[key]))
    )


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _number(config: Any, names: Sequence[str]) -> int:
    """The first of these attributes that is a positive number; 0 where there is none."""
    values = (config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _attention_width(model: nn.Module) -> int:
    config = _config(model)
    heads, head_width = _number(config, _HEADS), _number(config, ("head_dim",))
    return heads * head_width if head_width else _number(config, _HIDDEN)


def _floating(dtype: DtypeLike | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1 else None


def _usual_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)
