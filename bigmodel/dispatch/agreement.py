"""Device maps that say two things of one weight, seen before anything is read for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..device_map import covering_entry
from ..devices import DeviceKey
from ..errors import PlanError
from .cut import cut, registered_tensors

__all__ = ["refuse_contradictions"]


def refuse_contradictions(model: nn.Module, device_map: Mapping[str, DeviceKey], main_device: torch.device, offload_buffers: bool) -> None:
    """Raises `PlanError` for a weight that would run from the disk by one entry of the map, and is read into memory by another.

    A module that stands in several places, or that reads its children's weights, runs as a whole, by the entry for its first name, or for
    its own. Its weights are read to the fastest of the places that the map has for any of their names.
    """
    if "disk" not in device_map.values() or len(set(device_map.values())) == 1:
        return
    plan = cut(model, device_map, main_device)
    for tensor in registered_tensors(model):
        if tensor.is_buffer and not (offload_buffers and tensor.persistent):
            continue
        if any(plan.rests(places[0][0]) != "disk" for places in tensor.by_owner()):
            continue
        for name in tensor.names:
            entry = covering_entry(name, device_map)
            if entry is None or device_map[entry] == "disk":
                continue
            by, module = plan.entry(tensor.name), tensor.name.rpartition(".")[0]
            others = [other.rpartition(".")[0] for other in tensor.names if other.rpartition(".")[0] != module]
            why = f"The module {module} stands in the model as {', '.join(others)} too" if others else f"The module {by} is never cut"
            raise PlanError(
                f"{why}, and the device map sends {tensor.name} to two places: to 'disk' by its entry {by!r}, and to "
                f"{device_map[entry]!r} by its entry {entry!r}. Give both entries the same device."
            )
