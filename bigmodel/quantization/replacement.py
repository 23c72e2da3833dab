"""Packed layers in the place of linear ones: of a model that is loaded, and with what a loader has packed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from ..modules import owner_of
from ..protocols import TensorSpec
from ..text import listed, names_text
from .config import Scheme, scheme_of, transformers_config
from .matrices import is_linear, is_transposed
from .packed_embedding import PackedEmbedding, packed_table
from .packed_format import PackedFormat, chosen_by
from .packed_linear import packed_layer
from .packed_stack import PackedStack, attach
from .packed_weight import PackedWeight

__all__ = [
    "has_4bit_bnb_layers",
    "has_packed_stacks",
    "install",
    "pack",
    "packed_layers",
    "replace_with_bnb_layers",
    "run_by_index",
    "unknown_to_transformers",
]

BY_INDEX: Final = (None, "eager", "batched_mm")
"""transformers' implementations of experts that take matrices by index. (Without a choice, it is the module's own forward, `eager`.)"""

logger = logging.getLogger(__name__)


def pack(value: torch.Tensor, packing: PackedFormat) -> dict[str, torch.Tensor]:
    """The packed weight and its companions, by name (`"weight"`, `"absmax"`, …), where `value` is."""
    return _packed(value, packing, packing.tensors(tuple(value.shape)))


def _packed(value: torch.Tensor, packing: PackedFormat, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    way = packing.begin("", specs, tuple(value.shape), value.device)
    way.pack(0, value.detach().flatten(0, -2))
    return dict(way.finish())


def install(model: nn.Module, scheme: Scheme, packed: Mapping[str, tuple[torch.dtype, Mapping[str, torch.Tensor]]]) -> None:
    """Replaces linear layers, stacks of matrices and embeddings by packed ones with what a loader kept of their weights.

    `packed`: full name of a weight or a stack → the dtype that it was packed from, and the kept tensors by full name. A layer that stands
    in several places is replaced in all of them.
    """
    places = Places(model)
    for name, (dtype, tensors) in packed.items():
        owner, key = owner_of(model, name)
        kept = {each.rpartition(".")[2]: tensor for each, tensor in tensors.items()}
        if is_linear(owner):
            layer = packed_layer(owner, scheme, dtype)
            layer.fill(kept)
            places.put(owner, layer)
        elif isinstance(owner, nn.Embedding):
            table = packed_table(owner, scheme.format, dtype)
            table.fill(kept)
            places.put(owner, table)
        else:
            stack = PackedStack(tuple(owner._parameters[key].shape), scheme.format, dtype)  # type: ignore[union-attr]
            stack.fill(kept)
            attach(owner, key, stack)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: Any,
    modules_to_not_convert: str | Collection[str] | None = None,
    current_key_name: Collection[str] | None = None,
) -> nn.Module:
    """Replaces linear layers, and stacks of expert matrices, by packed ones. Weights with values are packed now, one by one; on meta, the
    packed layer is too.

    `modules_to_not_convert` (by default the config's `skip_modules`, or the output head and tied weights) are left as they are, by full
    name or a run of its components. `current_key_name` is accepted for old scripts. A model in which nothing is replaced is a warning.

    Returns the same model. Raises `QuantizationError` for a config that is none.
    """
    scheme = scheme_of(bnb_quantization_config)
    skipped = scheme.format.skip_modules if modules_to_not_convert is None else modules_to_not_convert
    packing = scheme.format
    selection = chosen_by(replace(packing, skip_modules=None if skipped is None else listed(skipped)), model)
    chosen, stacks = {**selection.packed, **selection.tables}, list(selection.stacks)
    del selection
    if not chosen and not stacks:
        logger.warning(
            "No linear layer of %s was replaced by a packed one: it has none, or all of them are left out. Nothing is quantized.",
            type(model).__name__,
        )
    places = Places(model)
    waiting = list({id(each): each for each in chosen.values()}.values())
    chosen.clear()
    while waiting:  # the weights of each go before the next ones are packed
        module = waiting.pop(0)
        weight = module._parameters["weight"]
        assert weight is not None
        placed: PackedWeight
        if isinstance(module, nn.Embedding):
            placed = packed_table(module, packing, weight.dtype)
        else:
            placed = packed_layer(module, scheme, weight.dtype)
        if weight.device.type != "meta":
            placed.fill(_packed(weight.T if is_transposed(module) else weight, packing, placed.specs()))
        places.put(module, placed)
    for name in stacks:
        owner, key = owner_of(model, name)
        value = owner._parameters.get(key)
        if value is None:
            continue  # its module stands in several places, and it is packed
        stack = PackedStack(tuple(value.shape), packing, value.dtype)
        if value.device.type != "meta":
            stack.fill(pack(value, packing))
        del value
        attach(owner, key, stack)
    for name, layer in packed_layers(model).items():
        layer.note_name(name)
    run_by_index(model)
    return model


class Places:
    """Where the modules of a model stand, so that one can be replaced in all of its places."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    self._places.setdefault(id(child), []).append((module, name))

    def put(self, old: nn.Module, new: nn.Module) -> None:
        """Replaces `old` by `new`."""
        for parent, name in self._places.pop(id(old)):
            parent._modules[name] = new


def packed_layers(model: nn.Module) -> dict[str, PackedWeight]:
    """The packed layers and stacks of a model, by full name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def has_packed_stacks(model: nn.Module) -> bool:
    """Whether a stack of expert matrices of the model is packed."""
    return any(isinstance(module, PackedStack) for module in model.modules())


def unknown_to_transformers(model: nn.Module) -> str:
    """What transformers could not load of the model, if it were saved: kinds of packed weights, in words; empty where it could."""
    layers = packed_layers(model)
    kinds: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer, PackedStack):
            kinds.setdefault("packed experts", []).append(name)
        elif isinstance(layer, PackedEmbedding):
            kinds.setdefault("packed embeddings", []).append(name)
        elif transformers_config(Scheme(layer.packing), ()) is None:
            kinds.setdefault(f"layers packed as {layer.packing.name}", []).append(name)
    return "; ".join(f"{kind} ({names_text(names[:3])}{', …' if len(names) > 3 else ''})" for kind, names in kinds.items())


def run_by_index(model: nn.Module) -> None:
    """Lets models of transformers whose experts are packed compute with one expert after the other, where they would with all at once."""
    for module in model.modules():
        ask, change = (getattr(module, f"{verb}_experts_implementation", None) for verb in ("get", "set"))
        if ask is None or change is None or not has_packed_stacks(module):
            continue
        current: dict[str, str | None] = ask()
        if any(each not in BY_INDEX for each in current.values()):
            change({name: each if each in BY_INDEX else "eager" for name, each in current.items()})


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of the model is one of bitsandbytes' 4-bit layers."""
    import bitsandbytes  # takes seconds

    return any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules())
