"""Device maps as people write them: made short, and checked against a model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from ..device_map import covering_entry, unknown_entries
from ..errors import PlanError

__all__ = ["check_device_map", "clean_device_map"]

T = TypeVar("T")


def clean_device_map(device_map: dict[str, T], module_name: str = "") -> dict[str, T]:
    """Replaces the entries below a module by one for the module wherever two or more of them agree, from the top down.

    The dict itself is changed and returned; a shortened entry stands where the first of those that it replaces stood. Entries that lie
    under another entry with a different device are exceptions to it and are left as they are.
    """
    below: defaultdict[str, list[str]] = defaultdict(list)
    for key in device_map:
        name = key
        while name:
            name = name.rpartition(".")[0]
            below[name].append(key)

    replaced: dict[str, str] = {}  # entry → the module that stands for it now

    def shorten(prefix: str) -> None:
        keys = below.get(prefix, [])
        values = {device_map[key] for key in keys}
        cover = covering_entry(prefix, device_map)
        if len(keys) > 1 and len(values) == 1 and (cover is None or device_map[cover] in values):
            replaced.update(dict.fromkeys(keys, prefix))
            return
        start = len(prefix) + 1 if prefix else 0
        for child in dict.fromkeys(key[:end] for key in keys if (end := key.find(".", start)) != -1):
            shorten(child)

    shorten(module_name)
    if replaced:
        entries = list(device_map.items())
        device_map.clear()
        for key, device in entries:
            device_map.setdefault(replaced.get(key, key), device)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, object]) -> None:
    """Refuses a map that leaves a tensor of the model's state dict without a device; warns of keys that name nothing in the model.

    Raises `PlanError` (a ValueError) that lists the uncovered tensors.
    """
    tensors = list(model.state_dict(keep_vars=True))
    unknown = unknown_entries(model, device_map)
    if unknown:
        warnings.warn(f"The following device_map keys do not match any submodules in the model: {unknown}", UserWarning, stacklevel=2)
    uncovered = [name for name in tensors if covering_entry(name, device_map) is None]
    if uncovered:
        shown = uncovered if len(uncovered) <= 20 else [*uncovered[:20], f"… and {len(uncovered) - 20} more"]
        raise PlanError(
            "The device_map provided does not give any device for the following parameters: "
            + ", ".join(shown)
            + '. Add entries for their modules, or an entry "" for everything else.'
        )
