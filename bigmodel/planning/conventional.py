"""The walk that scripts expect of `infer_auto_device_map`: devices filled one after the other, room kept for the largest layer to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..devices import DeviceKey
from ..modules import class_names
from .items import Unit
from .solver import Assignment, least_ring_bytes, whole_groups
from .ties import get_module_size_with_ties

__all__ = ["fallback_allocate", "walk"]


def walk(units: Sequence[Unit], budgets: Mapping[DeviceKey, int]) -> Assignment | None:
    """Places the units in model order, never returning to a device that was left.

    The first accelerator and "cpu" keep room for the largest layer that is still to be placed. None if the result could not run: the
    first accelerator that holds something has no room for what passes through, or a disk budget is exceeded.
    """
    devices = [*(key for key in budgets if key != "disk"), "disk"]
    accelerators = [key for key in devices if key not in ("cpu", "disk")]
    keeps_room = {*accelerators[:1], "cpu"}
    largest_after = [0]
    for unit in reversed(units):
        largest_after.append(max(largest_after[-1], *unit.slot_bytes, 0))
    largest_after.reverse()

    places: list[DeviceKey] = []
    position, used = 0, 0
    for index, unit in enumerate(units):
        while devices[position] != "disk":
            reserve = largest_after[index + 1] if devices[position] in keeps_room else 0
            if used + unit.total_bytes + reserve <= budgets[devices[position]]:
                break
            position, used = position + 1, 0
        places.append(devices[position])
        used += unit.total_bytes
    if devices[position] == "disk" and used > budgets.get("disk", used):
        return None

    main: DeviceKey = next((place for place in places if place in accelerators), "cpu")
    stored = {"cpu", "disk"} if accelerators else {"disk"}
    offloaded = [unit for unit, place in zip(units, places, strict=True) if place in stored]
    staying_bytes = sum(unit.staying_bytes for unit in offloaded)
    reserve_bytes = least_ring_bytes(offloaded)
    resident_bytes = sum(unit.total_bytes for unit, place in zip(units, places, strict=True) if place == main)
    if main in budgets and resident_bytes + staying_bytes + reserve_bytes > budgets[main]:
        return None
    moved_bytes = sum(unit.moved_bytes for unit in offloaded)
    return Assignment(tuple(places), main, whole_groups(offloaded, reserve_bytes), reserve_bytes, moved_bytes, is_optimal=False)


def fallback_allocate(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    size_limit: int | float,
    no_split_module_classes: str | Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[tuple[str, Any]]]:
    """The first module or tensor, breadth first, that takes at most `size_limit` bytes together with what it is tied to.

    Returns its name, itself, and the rest of `modules` in which the parents of what was found are replaced by their children. If there
    is none: None, None and `modules` as they are.
    """
    classes = class_names(no_split_module_classes)
    queue: deque[tuple[str, Any, tuple[str, ...]]] = deque((name, module, ()) for name, module in modules)
    while queue:
        name, module, parents = queue.popleft()
        ties = [group for group in tied_parameters or [] if any(f"{tied}.".startswith(f"{name}.") for tied in group)]
        elsewhere = [tied for group in ties for tied in group if not f"{tied}.".startswith(f"{name}.")]
        others = [(other, part) for other, part in modules if not f"{name}.".startswith(f"{other}.")]
        reachable = [tied for tied in elsewhere if any(f"{tied}.".startswith(f"{other}.") for other, _ in others)]
        nbytes, _, _ = get_module_size_with_ties(reachable, module_sizes.get(name, 0), module_sizes, others)
        if nbytes <= size_limit:
            return name, module, _without(modules, name, set(parents))
        if isinstance(module, nn.Module) and type(module).__name__ not in classes:
            queue.extend((f"{name}.{key}", part, (*parents, name)) for key, part in _parts(module))
    return None, None, list(modules)


def _parts(module: nn.Module) -> list[tuple[str, Any]]:
    children = list(module.named_children())
    return [*module.named_parameters(recurse=False), *children, *module.named_buffers(recurse=False)] if children else []


def _without(modules: Sequence[tuple[str, Any]], found: str, parents: set[str]) -> list[tuple[str, Any]]:
    rest: list[tuple[str, Any]] = []
    for name, module in modules:
        if name in parents:
            rest += _without([(f"{name}.{key}", part) for key, part in _parts(module)], found, parents)
        elif name != found:
            rest.append((name, module))
    return rest
