"""One tensor of a module: to another device, to another value, under the rules that scripts rely on."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from ..devices import as_device, clear_device_cache
from ..protocols import Offloaded
from .dtypes import as_dtype
from .replace import new_parameter

__all__ = ["set_module_tensor_to_device"]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: MutableMapping[int, dict[Any, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Puts the parameter or buffer `tensor_name` (dots lead to submodules) on `device`, with `value` if one is given.

    Args:
        value: the new content, of the same shape; cast to the tensor's own dtype, or to `dtype` if that is given and it is floating.
            Without it the tensor itself moves; a tensor on meta has nothing to move.
        dtype: only floating values are converted; ignored when the tensor neither moves nor gets a value.
        fp16_statistics: scales that belong to an int8 weight; kept as its attribute `SCB`.
        tied_params_map: data pointer → device → tensor that is already there: tensors of one pointer are moved once.
        non_blocking: whether the copy may be queued.
        clear_cache: whether the accelerator's unused memory is given back afterwards.

    An offloaded tensor stays offloaded, and rests in RAM with the new `value`.

    Raises AttributeError for a path that does not exist; ValueError when the last name is no parameter or buffer, the shapes differ, or
    a tensor on meta shall get a device without a value.
    """
    path, _, name = tensor_name.rpartition(".")
    for part in path.split(".") if path else []:
        child = getattr(module, part)
        if child is None:
            raise ValueError(f"{module} has no attribute {part}.")
        module = child
    if name not in module._parameters and name not in module._buffers:
        raise ValueError(f"{module} does not have a parameter or a buffer named {name}.")
    wanted = None if dtype is None else as_dtype(dtype)
    is_parameter = name in module._parameters
    table: dict[str, Any] = module._parameters if is_parameter else module._buffers
    old = table[name]
    target = as_device(device)

    if isinstance(old, Offloaded) and value is not None and target.type != "meta":
        before: torch.Tensor = table[name]
        _refuse_other_shape(tensor_name, value, before)
        new_dtype = before.dtype if wanted is None else wanted if value.is_floating_point() else value.dtype
        # What brings it to the arithmetic would put its old values into the place of anything that is registered beside it.
        old.rest_in_memory(value.detach().to("cpu", new_dtype, copy=True))
        return
    pointer = (value if value is not None else old).data_ptr() if (value is not None or old is not None) else 0
    tied = tied_params_map.get(pointer) if tied_params_map is not None and pointer else None
    if tied is not None and (known := tied.get(device, tied.get(target))) is not None:
        table[name] = known
        return
    if value is None and (old is None or (old.device.type == "meta" and target.type != "meta")):
        raise ValueError(f"{tensor_name} is on the meta device, we need a `value` to put in on {device}.")
    if value is not None and old is not None and not hasattr(old, "quant_state"):
        _refuse_other_shape(tensor_name, value, old)

    with torch.no_grad():
        source = old.detach() if value is None else value.detach()
        if value is not None and (wanted is None or value.is_floating_point()):
            source = source.to(wanted or (old.dtype if old is not None else value.dtype))
        elif value is None and wanted is not None and target.type == "meta" and old.is_floating_point():
            source = torch.empty_like(source, dtype=wanted, device="meta")
        elif value is None and _same_device(old.device, target):
            return
        new = _rebuilt(old, source, target, fp16_statistics, non_blocking) if is_parameter else source.to(target, non_blocking=non_blocking)
    table[name] = new

    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()
    if tied is not None:
        tied[device] = new


def _refuse_other_shape(name: str, value: torch.Tensor, old: torch.Tensor) -> None:
    if value.shape != old.shape:
        raise ValueError(f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape}), this looks incorrect.')


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.type == "cpu" or (a.index or 0) == (b.index or 0))


def _rebuilt(
    old: nn.Parameter | None, source: torch.Tensor, target: torch.device, statistics: torch.Tensor | None, non_blocking: bool
) -> nn.Parameter:
    """A new parameter of the class and attributes of `old`. Packed weights (bitsandbytes') pack themselves on their way to the device."""
    if old is None:
        return nn.Parameter(source.to(target, non_blocking=non_blocking), requires_grad=source.is_floating_point())
    if type(old) is nn.Parameter:
        return new_parameter(old, source.to(target, non_blocking=non_blocking))
    attributes = dict(old.__dict__)
    initialized = attributes.pop("_is_hf_initialized", None)
    try:
        new: Any = type(old)(source.to("cpu"), requires_grad=old.requires_grad, **attributes).to(target, non_blocking=non_blocking)
    except TypeError:  # a subclass whose constructor does not take its attributes
        return new_parameter(old, source.to(target, non_blocking=non_blocking))
    if statistics is not None:
        new.SCB = statistics.to(target)
    if initialized is not None:
        new._is_hf_initialized = initialized
    result: nn.Parameter = new
    return result
