"""Device maps: module name → device, as the ecosystem writes them (`{"": 0}`, `{"layers.0": "cpu", "layers.1": "disk"}`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from .devices import DeviceKey, as_key
from .errors import PlanError

__all__ = ["covering_entry", "device_for", "normalized", "unknown_entries"]

T = TypeVar("T")


def covering_entry(name: str, device_map: Mapping[str, T]) -> str | None:
    """The deepest key of `device_map` that covers the tensor or module `name`: the name itself or a dot-bounded prefix, `""` last."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def device_for(name: str, device_map: Mapping[str, T]) -> T | None:
    """The value of the deepest entry that covers `name`, or None."""
    entry = covering_entry(name, device_map)
    return None if entry is None else device_map[entry]


def normalized(device_map: Mapping[str, object]) -> dict[str, DeviceKey]:
    """The same map with values as `devices.as_key` writes them.

    Raises `PlanError` on an unknown device, naming the entry, and for what is no mapping.
    """
    if not isinstance(device_map, Mapping):
        raise PlanError(
            f"The device map is {device_map!r}, not a mapping of module names to devices. Everything on one device is {{'': device}}."
        )
    return {name: as_key(device, where=f"entry {name!r} of the device map") for name, device in device_map.items()}


def unknown_entries(model: nn.Module, device_map: Mapping[str, object]) -> list[str]:
    """The keys of `device_map` that name no module, parameter or buffer of `model`."""
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return [name for name in device_map if name not in known]
