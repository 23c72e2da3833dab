"""State dicts of offloaded models with all their values, for scripts that save them by themselves."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from .align import as_torch_device
from .lazy import LazyTensor

__all__ = ["get_state_dict_from_offload", "get_state_dict_offloaded_model"]

logger = logging.getLogger(__name__)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The model's state dict with all values on CPU, wherever they rest. What is on CPU already is not copied; ties share their memory.

    Tensors on meta that rest nowhere are left out with a warning. Raises MemoryError for a model that is larger than the RAM that is left.
    """
    state: dict[str, Any] = {}
    fetched: dict[int, torch.Tensor] = {}
    left_out: list[str] = []
    for name, tensor in model.state_dict().items():
        try:
            if isinstance(tensor, LazyTensor):
                if id(tensor.origin) not in fetched:
                    fetched[id(tensor.origin)] = tensor.origin.fetch(torch.device("cpu"))
                state[name] = fetched[id(tensor.origin)]
            elif isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                left_out.append(name)
            else:
                state[name] = tensor.to("cpu") if isinstance(tensor, torch.Tensor) else tensor
        except MemoryError as error:
            raise MemoryError(
                f"The offloaded model does not fit into the RAM that is left: {name} is the first tensor that does not. "
                "bigmodel.save_model writes a model with one tensor in memory at a time."
            ) from error
    if left_out:
        logger.warning("These tensors are on the meta device and rest nowhere, so the state dict lacks them: %s", ", ".join(left_out))
    return state


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: int | str | torch.device = "cpu"
) -> dict[str, Any]:
    """Fills those entries of `state_dict` that are tensors of `module` with their values; returns the same dict.

    `module_name` is the full name of any tensor of the module (`"layers.0.weight"`): what stands before its last dot is the module's name.
    Offloaded values come to `device_to_put_offload`; other tensors are the module's own.
    """
    prefix = module_name.rpartition(".")[0]
    for name, tensor in module.state_dict().items():
        full_name = f"{prefix}.{name}" if prefix else name
        if full_name in state_dict:
            is_away = isinstance(tensor, LazyTensor)
            state_dict[full_name] = tensor.origin.fetch(as_torch_device(device_to_put_offload)) if is_away else tensor
    return state_dict
