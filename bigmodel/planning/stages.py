"""What each item of a plan computes and moves in a step: the stages that the cost model adds up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..devices import DeviceKey, computing_key
from ..modules import owner_of, reads_rows_only
from .config_fields import ConfigFields, text_config
from .cost import Run, Stage
from .items import Inventory, Item
from .sizes import DtypeLike

__all__ = ["ModelFacts", "facts_of", "run_of", "stages_of"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "num_selected_experts")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


@dataclass(slots=True)
class _Footprint:
    """What one item computes, whatever dtype it is in."""

    matrices: list[int] = field(default_factory=list)
    """Identities of the weights that every token is multiplied with."""
    experts: list[int] = field(default_factory=list)
    """Identities of the weights of routed experts."""
    tables: list[tuple[int, int]] = field(default_factory=list)
    """Identity and rows of each row table."""
    weights: int = 0
    expert_weights: int = 0
    activation_width: int = 0
    calls: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the cost model has to know of a model: read off its modules and its config once, for any number of plans."""

    footprints: Mapping[str, _Footprint]
    """By name of the item."""
    file_bytes: Mapping[int, int]
    """Bytes of each tensor as the model has it now, by identity."""
    dtype: torch.dtype
    """That of most of the weights."""
    experts: int
    experts_per_token: int
    hidden_width: int
    attention_width: int


def facts_of(model: nn.Module, inventory: Inventory) -> ModelFacts:
    """Walks over the model once.

    Every parameter of two dimensions or more is a matrix that each token is multiplied with once; embeddings that are only looked up are
    none. The routed experts are the modules of a `ModuleList` of as many modules, and the parameters of three dimensions whose first one
    is as long, as the config says experts (`num_experts_per_tok` of them for a token). Without a config there are none.
    """
    config = ConfigFields(text_config(getattr(model, "config", None)))
    experts, each = config.number(*_EXPERTS, default=0), config.number(*_EXPERTS_PER_TOKEN, default=0)
    if not 0 < each <= experts:
        experts = each = 0
    file_bytes: dict[int, int] = {}
    elements: dict[torch.dtype, int] = {}
    footprints: dict[str, _Footprint] = {}
    for item in inventory.items:
        module = _module(model, item)
        if module is None:  # added or looked at by the modules around: not multiplied with
            footprints[item.name] = _Footprint()
            tensors = [getattr(*owner_of(model, name)) for name in item.entries]
            file_bytes |= {id(tensor): tensor.nbytes for tensor in tensors}
        else:
            footprints[item.name] = _footprint(module, inventory, experts, each, file_bytes, elements)
    usual = max(elements, key=lambda dtype: elements[dtype], default=torch.bfloat16)
    hidden_width, heads, head_width = (config.number(*names, default=0) for names in (_HIDDEN, _HEADS, ("head_dim",)))
    return ModelFacts(footprints, file_bytes, usual, experts, each, hidden_width, heads * head_width or hidden_width)


def run_of(facts: ModelFacts, dtype: DtypeLike | None, batch: int) -> Run:
    """The arithmetic of a run: its dtype is the planned one where that is a floating dtype of torch, else that of most of the weights."""
    arithmetic = _floating(dtype) or facts.dtype
    name = str(arithmetic).removeprefix("torch.")
    return Run(name, arithmetic.itemsize, batch, facts.experts, facts.experts_per_token, facts.hidden_width)


def stages_of(
    facts: ModelFacts,
    inventory: Inventory,
    places: Mapping[str, DeviceKey],
    main: DeviceKey,
    *,
    offload_buffers: bool,
    state_bytes: Mapping[str, int] | None = None,
) -> list[Stage]:
    """One stage for every item, in the order of the model: `places` says where each rests, by name, `main` where the offloaded ones run.

    `state_bytes` is the KV cache of each block.
    """
    stores = {"disk"} if main == "cpu" else {"cpu", "disk"}
    state = state_bytes or {}
    nbytes = inventory.nbytes
    stages = []
    for item in inventory.items:
        place = places[item.name]
        away = place in stores
        found = facts.footprints[item.name]
        saved = [key for key in item.tensors if inventory.buffers.get(key, True)]
        stages.append(
            Stage(
                item.name,
                runs_on=main if away else computing_key(place),
                rests_on=computing_key(place),
                weights=found.weights,
                weight_bytes=sum(nbytes[key] for key in found.matrices),
                expert_weights=found.expert_weights,
                expert_bytes=sum(nbytes[key] for key in found.experts),
                moved_bytes=_moved_bytes(item, inventory, offload_buffers=offload_buffers) if away else 0,
                row_bytes=sum(nbytes[key] // rows for key, rows in found.tables) if away else 0,
                activation_width=found.activation_width,
                attention_width=facts.attention_width if item.is_block else 0,
                cache_bytes=state.get(item.name, 0) if item.is_block else 0,
                calls=found.calls,
                file_bytes=sum(facts.file_bytes[key] for key in saved),
                loaded_bytes=sum(nbytes[key] for key in saved),
            )
        )
    return stages


def _module(model: nn.Module, item: Item) -> nn.Module | None:
    """The module that the item is; None for tensors that an inner module holds itself."""
    try:
        return model.get_submodule(item.name)
    except AttributeError:
        return None


def _footprint(
    module: nn.Module, inventory: Inventory, experts: int, each: int, file_bytes: dict[int, int], elements: dict[torch.dtype, int]
) -> _Footprint:
    found = _Footprint()
    stack = [(module, False)]
    while stack:
        current, in_expert = stack.pop()
        is_list = isinstance(current, nn.ModuleList)
        found.calls += not is_list and not in_expert
        is_table = reads_rows_only(current)
        for tensor in [*current._parameters.values(), *current._buffers.values()]:
            if tensor is None:
                continue
            key, size, count = id(tensor), tensor.element_size(), tensor.numel()
            file_bytes[key] = size * count
            if key in inventory.buffers or tensor.dim() < 2:
                continue
            if size > 1 and tensor.is_floating_point():
                elements[tensor.dtype] = elements.get(tensor.dtype, 0) + count
            if not is_table:
                _count(found, tensor, count, experts, each, in_expert=in_expert)
            elif key in inventory.row_tables:
                found.tables.append((key, max(1, tensor.shape[0])))
        inside = in_expert or (is_list and experts > 0 and len(current._modules) == experts)
        stack += [(child, inside) for child in current._modules.values() if child is not None]
    return found


def _count(found: _Footprint, matrix: torch.Tensor, count: int, experts: int, each: int, *, in_expert: bool) -> None:
    shape = matrix.shape
    is_stack = len(shape) == 3 and experts > 0 and shape[0] == experts
    if in_expert or is_stack:
        found.expert_weights += count
        found.experts.append(id(matrix))
        # In a list of experts every one of them comes here; in a stack all come at once.
        found.activation_width += (shape[1] + shape[2]) * each if is_stack else (shape[0] + shape[1]) * each // experts
    else:
        found.weights += count
        found.matrices.append(id(matrix))
        found.activation_width += shape[0] + shape[1]


def _moved_bytes(item: Item, inventory: Inventory, *, offload_buffers: bool) -> int:
    buffers = inventory.buffers
    return sum(
        inventory.nbytes[key]
        for key in item.tensors
        if key not in inventory.row_tables and (key not in buffers or (offload_buffers and buffers[key]))
    )


def _floating(dtype: DtypeLike | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1 else None
