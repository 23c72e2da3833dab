"""From any form of a device map to a checked one: planned if it is the name of a strategy, on devices that this machine has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .device_map import covering_entry, normalized, unknown_entries
from .devices import CPU_RESIDENT, DeviceKey, as_device
from .errors import PlanError
from .loading import DtypeOf
from .modules import named_module_tensors
from .planning import Plan, check_device_map, plan
from .planning.sizes import tensor_bytes_rule
from .protocols import TensorSpec, WeightFormat

__all__ = ["DeviceMap", "Placing", "find_placing", "main_device_of", "refuse_absent"]

DeviceMap = str | int | torch.device | Mapping[str, Any] | Plan
"""Module name → device, one device for everything, a plan, or the name of a way to find one."""

UNCOUNTED_SHARE: Final = 0.02
"""Of a model, what a plan made from a checkpoint's headers may not have known of: tensors that the model's code computes."""
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, slots=True)
class Placing:
    """A device map that was checked, and what dispatch has to know beside it."""

    device_map: dict[str, DeviceKey]
    main_device: torch.device
    """Where offloaded modules run."""
    offload_buffers: bool
    ring_bytes: int | None = None
    """Room for groups that pass through, where a plan kept it; without one, dispatch takes what is free, up to room for two."""


def find_placing(
    model: nn.Module,
    device_map: DeviceMap | Placing,
    *,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: torch.dtype | str | None = None,
    dtype_of: DtypeOf | None = None,
    offload_buffers: bool = False,
    weight_format: WeightFormat | None = None,
) -> Placing:
    """Any form of a device map as module name → device, on devices that are there; a strategy is planned, a `Plan` is taken at its word.
    A `Placing` stays as it is.

    Raises `PlanError` (a ValueError) for an unknown strategy, an unknown device, a map that leaves a tensor without a place, and a plan
    that was made for another model, or for weights that take less than this load gives them.
    """
    if isinstance(device_map, Placing):
        return device_map
    if isinstance(device_map, str) and device_map in STRATEGIES:
        device_map = plan(
            model,
            max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            special_dtypes=None if dtype_of is None else _planned_dtypes(model, dtype_of),
            mode=device_map,
            offload_buffers=offload_buffers,
            weight_format=weight_format,
            advice=False,
        )
    if isinstance(device_map, Plan):
        _refuse_other_plan(model, device_map, dtype, dtype_of, weight_format)
        main = next(use for use in device_map.devices if use.device == device_map.main_device)
        place = Placing(
            dict(device_map.device_map),
            as_device(device_map.main_device),
            device_map.offload_buffers,
            main.reserve_bytes or None,
        )
    elif isinstance(device_map, Mapping):
        check_device_map(model, dict(device_map))
        devices = normalized(device_map)
        place = Placing(devices, main_device_of(devices), offload_buffers)
    else:
        try:
            devices = normalized({"": device_map})
        except PlanError as error:
            raise PlanError(
                f"{device_map!r} is not a device map: use one of {', '.join(map(repr, STRATEGIES))}, a device, or a dict of "
                "module name → device."
            ) from error
        place = Placing(devices, main_device_of(devices), offload_buffers)
    refuse_absent(place.device_map)
    return place


def _refuse_other_plan(
    model: nn.Module, made: Plan, dtype: torch.dtype | str | None, dtype_of: DtypeOf | None, weight_format: WeightFormat | None
) -> None:
    """Raises `PlanError` where the plan is not one of this model, loaded like this."""
    name = type(model).__name__
    again = "Plan the model that is loaded, with the dtype that it is loaded in, and the packed format."
    if unknown := unknown_entries(model, made.device_map):
        raise PlanError(f"This plan was made for {made.model}: {name} has no {', '.join(map(repr, unknown[:3]))}. {again}")
    uncovered = [entry for entry, _ in named_module_tensors(model, recurse=True) if covering_entry(entry, made.device_map) is None]
    if uncovered:
        raise PlanError(
            f"This plan was made for {made.model}: it has no place for {', '.join(map(repr, uncovered[:3]))} of {name}. {again}"
        )
    special = None if dtype_of is None else _planned_dtypes(model, dtype_of)
    rule = tensor_bytes_rule(dtype, special, None if weight_format is None else weight_format.packed_sizes(model))
    loaded_bytes = sum(rule(entry, tensor) for entry, tensor in named_module_tensors(model, recurse=True))
    if loaded_bytes > (1 + UNCOUNTED_SHARE) * made.total_bytes:
        packed = f" packed as {made.weight_format}" if made.weight_format else ""
        raise PlanError(
            f"This plan is for {made.model} of {made.total_bytes:,} bytes{packed}, and loading this {name} takes {loaded_bytes:,}. {again}"
        )


def refuse_absent(devices: Mapping[str, DeviceKey]) -> None:
    """Raises `PlanError` for a device that this machine lacks: before anything is read or written."""
    for device in set(devices.values()) - {"disk"}:
        as_device(device)


def _planned_dtypes(model: nn.Module, dtype_of: DtypeOf) -> dict[str, torch.dtype]:
    """What each tensor will be loaded as; where the file's dtype decides, the model's own stands in for it."""
    return {
        name: dtype_of(name, TensorSpec(tuple(tensor.shape), tensor.dtype), tensor.dtype)
        for name, tensor in named_module_tensors(model, recurse=True)
    }


def main_device_of(device_map: Mapping[str, DeviceKey]) -> torch.device:
    """Where offloaded modules run: the first accelerator in the map's own order, or the CPU."""
    return as_device(next((key for key in device_map.values() if key not in ("cpu", CPU_RESIDENT, "disk")), "cpu"))
