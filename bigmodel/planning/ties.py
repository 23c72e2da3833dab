"""Tied weights: whether a model ties, whether a map keeps ties together, and the same object again for every name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from ..device_map import covering_entry
from ..errors import PlanError
from ..modules import owner_of

__all__ = [
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "get_module_size_with_ties",
    "retie_parameters",
]

logger = logging.getLogger(__name__)
Part = TypeVar("Part")


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model says that it ties weights: its (text) config, or a module with `_tie_weights`. False for others."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return False
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    output_embeddings: Any = getattr(model, "get_output_embeddings", None)
    if getattr(text_config, "tie_word_embeddings", False) and output_embeddings is not None and output_embeddings() is not None:
        return True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, object]) -> None:
    """Warns (log) about every group of tied names that the map spreads over several devices.

    Raises `PlanError` (a ValueError) for a name that no entry covers.
    """
    for group in tied_params:
        devices: dict[str, object] = {}
        for name in group:
            entry = covering_entry(name, device_map)
            if entry is None:
                raise PlanError(
                    f"The `device_map` does not contain the module {name}. Add an entry for it, for a module above it, or for ''."
                )
            devices[name] = device_map[entry]
        if len(set(devices.values())) > 1:
            logger.warning("Tied parameters are on different devices: %s. Use one device for all of them.", devices)


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Part]],
) -> tuple[int, list[str], list[Part]]:
    """Bytes of a module together with the modules that share `tied_params` with it, the shared bytes once.

    Each tied name is looked for in `modules_to_treat` (name, module), in order; the first module that holds it comes along.
    Returns the bytes, the names and the modules that come along, each once. Raises `PlanError` for a name that none of them holds.
    """
    total_bytes = module_size
    partners: dict[str, Part] = {}
    for tied_name in tied_params:
        found = next(((name, part) for name, part in modules_to_treat if f"{tied_name}.".startswith(f"{name}.")), None)
        if found is None:
            raise PlanError(f"Tied parameter {tied_name!r} is in none of the modules that are still to be placed.")
        name, part = found
        if name not in partners:
            total_bytes += module_sizes.get(name, 0)
            partners[name] = part
        total_bytes -= module_sizes.get(tied_name, 0)
    return total_bytes, list(partners), list(partners.values())


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Gives all names of each group one object again: that of the first name whose tensor is not on meta. Groups all on meta stay."""
    for group in tied_params:
        owners = [owner_of(model, name) for name in group]
        tensors = [getattr(module, attribute) for module, attribute in owners]
        real = next((tensor for tensor in tensors if tensor is not None and tensor.device.type != "meta"), None)
        if real is None:
            continue
        for module, attribute in owners:
            setattr(module, attribute, real)
