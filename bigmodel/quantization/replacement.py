"""Packed layers in the place of linear ones: of a model that is loaded, and with what a loader has packed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..modules import owner_of
from ..protocols import TensorSpec
from .config import Scheme, scheme_of
from .formats import PackedFormat
from .matrices import is_transposed
from .packer import WeightPacker
from .selection import select

if TYPE_CHECKING:
    from .layers import PackedLinear

__all__ = ["has_4bit_bnb_layers", "install", "pack", "packed_layers", "replace_with_bnb_layers"]

logger = logging.getLogger(__name__)


def pack(value: torch.Tensor, packing: PackedFormat) -> dict[str, torch.Tensor]:
    """The packed weight and its companions, by name (`"weight"`, `"absmax"`, …), where `value` is."""
    spec = TensorSpec(tuple(value.shape), value.dtype)
    way = WeightPacker(packing, {}).begin("weight", spec, value.device)
    way.pack(0, value.detach())
    return dict(way.finish())


def install(model: nn.Module, scheme: Scheme, packed: Mapping[str, tuple[torch.dtype, Mapping[str, torch.Tensor]]]) -> None:
    """Replaces linear layers by packed ones with what a loader kept of their weights.

    `packed`: full name of a weight → the dtype that it was packed from, and the kept tensors by full name. A layer that stands in several
    places is replaced in all of them.
    """
    from .layers import packed_layer  # imports bitsandbytes, which takes seconds

    places = Places(model)
    for name, (dtype, tensors) in packed.items():
        linear, _ = owner_of(model, name)
        layer = packed_layer(linear, scheme, dtype)
        layer.fill({each.rpartition(".")[2]: tensor for each, tensor in tensors.items()})
        places.put(linear, layer)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: Any,
    modules_to_not_convert: Collection[str] | None = None,
    current_key_name: Collection[str] | None = None,
) -> nn.Module:
    """Replaces linear layers by packed ones. Weights with values are packed now, one by one; on meta, the packed layer is too.

    `modules_to_not_convert` (by default the config's `skip_modules`, or the output head and tied weights) are left as they are, by full
    name or a run of its components. `current_key_name` is accepted for old scripts. A model in which nothing is replaced is a warning.

    Returns the same model. Raises `QuantizationError` for a config that is none.
    """
    from .layers import packed_layer  # imports bitsandbytes, which takes seconds

    scheme = scheme_of(bnb_quantization_config)
    skipped = scheme.format.skip_modules if modules_to_not_convert is None else modules_to_not_convert
    chosen = select(model, skipped, scheme.format.kept).packed
    if not chosen:
        logger.warning(
            "No linear layer of %s was replaced by a packed one: it has none, or all of them are left out. Nothing is quantized.",
            type(model).__name__,
        )
    places = Places(model)
    waiting = list({id(each): each for each in chosen.values()}.values())
    chosen.clear()
    while waiting:  # the weights of each go before the next ones are packed
        linear = waiting.pop(0)
        weight = linear._parameters["weight"]
        assert weight is not None
        layer = packed_layer(linear, scheme, weight.dtype)
        if weight.device.type != "meta":
            layer.fill(pack(weight.T if is_transposed(linear) else weight, scheme.format))
        places.put(linear, layer)
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


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The packed layers of a model, by full name."""
    from .layers import PackedLinear  # imports bitsandbytes, which takes seconds

    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of the model is one of bitsandbytes' 4-bit layers."""
    import bitsandbytes  # takes seconds

    return any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules())
