"""`infer_auto_device_map`: the solver's assignment, or the map that scripts expect where that moves no more bytes."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn

from ..collecting import without_collecting
from ..devices import DeviceKey
from ..errors import PlanError
from ..modules import find_tied_parameters
from .conventional import walk
from .cutting import cut_where_nothing_else_works
from .device_maps import clean_device_map
from .items import Inventory, Travel, Unit, find_items, join_tied
from .memory import get_max_memory
from .sizes import DtypeLike, tensor_bytes_rule
from .solver import Assignment, assign, is_better
from .ties import check_tied_parameters_in_config

__all__ = ["infer_auto_device_map", "map_entries", "refuse_unplaced"]

logger = logging.getLogger(__name__)

FEW_LAYERS = 8
"""Models without blocks and with no more layers than this get the map that scripts expect, even where another moves fewer bytes."""


@without_collecting()
def infer_auto_device_map(
    model: nn.Module,
    max_memory: MutableMapping[Any, Any] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, DeviceKey]:
    """A device for every module: accelerators in order, then "cpu", then "disk" (unlimited unless `max_memory` says otherwise).

    The map is the solver's (`solver.assign`): no map moves fewer bytes per step. Where the walk that scripts expect does as well (devices
    filled one after the other in module order, room for the largest layer kept on the first accelerator), and always for plain models of
    a few layers (`FEW_LAYERS`), it is that walk's. Room to pass through is kept for the largest part of what is offloaded, on the main
    device: the first accelerator in the map.
    Devices that were skipped are filled later in either case, so `fallback_allocation` has nothing left to do and is accepted for scripts
    that pass it. `verbose` prints each placement, and why it is
    on none of the devices before.

    Raises `PlanError` for an empty model, an unknown device, an unreadable size, and a model that a "disk" budget leaves no room for.
    """
    budgets = get_max_memory(max_memory)
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        logger.warning(
            "The model weights are not tied. Please use the `tie_weights` method before using the `infer_auto_device_map` function."
        )
    inventory = find_items(model, tensor_bytes_rule(dtype, special_dtypes), no_split_module_classes)
    # Buffers that stay behind are reported below and not planned with: scripts expect the same map with and without `offload_buffers`.
    units = join_tied(inventory, Travel(True, alignment=1, whole_embeddings=True))
    assignment = assign(units, budgets, main_holds=True)
    if assignment.unplaced:
        cut = cut_where_nothing_else_works(
            inventory,
            assignment,
            budgets,
            lambda each: join_tied(each, Travel(True, alignment=1, whole_embeddings=True)),
            lambda each: assign(each, budgets, main_holds=True),
        )
        if cut is not None:
            inventory, units, assignment = cut.inventory, cut.units, cut.assignment
            logger.warning(cut.note)
    expected = walk(units, budgets)
    if expected is not None:
        is_plain = not inventory.blocks and len(units) <= FEW_LAYERS and expected.main == assignment.main and assignment.moved_bytes
        if is_plain or not is_better(assignment, expected, units):
            assignment = expected
    refuse_unplaced(units, assignment, budgets)

    device_map = map_entries(inventory, units, assignment)
    if verbose:
        in_order = "devices are filled in the order of the model, with room for the largest layer to come"
        why_not = in_order if assignment is expected else "no map with it there would run and move fewer bytes"
        for line in _placement_lines(units, assignment, budgets, why_not):
            print(line)
    _report_unused(units, assignment, budgets)
    if inventory.buffers and not offload_buffers:
        _warn_of_buffers(join_tied(inventory, Travel(False, alignment=1, whole_embeddings=True)), assignment, budgets)
    return OrderedDict(clean_device_map(device_map) if clean_result else device_map)


def map_entries(inventory: Inventory, units: Sequence[Unit], assignment: Assignment) -> dict[str, DeviceKey]:
    """One entry per item in the order of the model, except that the first item of the main device comes before all.

    Pipelines send their inputs to the first device of a map, and `dispatch_model` takes its first accelerator as the main device.
    """
    items = [(item, device) for unit, device in zip(units, assignment.places, strict=True) for item in unit.items]
    place = {entry: device for item, device in items for entry in item.entries}
    names = [entry for item in inventory.items for entry in item.entries]
    first = next((name for name in names if place[name] == assignment.main), None)
    return {name: place[name] for name in ([] if first is None else [first]) + names}


def refuse_unplaced(units: Sequence[Unit], assignment: Assignment, budgets: Mapping[DeviceKey, int]) -> None:
    """Raises `PlanError` when a "disk" budget leaves units without a place, naming the largest."""
    if not assignment.unplaced:
        return
    left = [units[index] for index in assignment.unplaced]
    largest = max(left, key=lambda unit: unit.total_bytes)
    names = " and ".join(repr(item.name) for item in largest.items[:3])
    offered = ", ".join(f"{key!r}: {budget:,}" for key, budget in budgets.items())
    raise PlanError(
        f"The budgets (bytes: {offered}) leave no room for {len(left)} of {len(units)} parts of the model, which take "
        f"{sum(unit.total_bytes for unit in units):,} bytes in all. Without a place: {sum(unit.total_bytes for unit in left):,} bytes, "
        f"the largest {names} with {largest.total_bytes:,}. Give 'disk' or 'cpu' more, or leave 'disk' out: then it has no limit."
    )


def _placement_lines(units: Sequence[Unit], assignment: Assignment, budgets: Mapping[DeviceKey, int], why_not: str) -> Iterator[str]:
    """For every unit, in the order of the model: its bytes, its device, and what is missing on the devices before that.

    `why_not` is said of a device on which nothing is missing.
    """
    placed = list(zip(units, assignment.places, strict=True))
    computing = {assignment.main, *(key for key in budgets if key not in ("cpu", "disk"))}
    left = {key: budgets[key] for key in budgets if key != "disk"}
    for unit, place in placed:
        if place in left:
            left[place] -= unit.total_bytes if place in computing else unit.stored_bytes
        if place not in computing and assignment.main in left:
            left[assignment.main] -= unit.staying_bytes
    if assignment.main in left and assignment.moved_bytes:
        left[assignment.main] -= assignment.reserve_bytes
    order: list[DeviceKey] = [*left, "disk"]
    for unit, place in placed:
        names = " and ".join(entry for item in unit.items for entry in item.entries)
        yield f"Putting {names or 'the whole model'} on {place} (size={unit.total_bytes})"
        for key in order[: order.index(place)]:
            kept_bytes = assignment.reserve_bytes if key == assignment.main and assignment.moved_bytes else 0
            kept = f", {kept_bytes} are kept for the weights that pass through" if kept_bytes else ""
            state = f"{max(0, left[key])} of {budgets[key]} bytes are left{kept}"
            if left[key] < unit.total_bytes:
                yield f"  Not enough space on {key}: {state}"
            else:
                yield f"  Not on {key}: {state}; {why_not}"


def _report_unused(units: Sequence[Unit], assignment: Assignment, budgets: Mapping[DeviceKey, int]) -> None:
    """Logs the devices that hold nothing while a slower one holds something, and what they would have needed."""
    keys = [key for key in budgets if key != "disk"]
    used = [position for position, key in enumerate([*keys, "disk"]) if key in assignment.places]
    smallest_bytes = min(unit.total_bytes for unit in units)
    lines = [
        f"  - {key}: {smallest_bytes + (assignment.reserve_bytes if key == assignment.main else 0)} bytes required"
        for position, key in enumerate(keys)
        if key not in assignment.places and position < max(used)
    ]
    if lines:
        logger.info(
            "No modules were assigned to the following devices due to insufficient memory:\n%s\nGive them that, or leave them out.",
            "\n".join(lines),
        )


def _warn_of_buffers(units: Sequence[Unit], assignment: Assignment, budgets: Mapping[DeviceKey, int]) -> None:
    """Warns when the buffers of offloaded layers, which stay on the main device, fit into no accelerator."""
    left = {key: budget for key, budget in budgets.items() if key not in ("cpu", "disk")}
    if not left:
        return
    staying_bytes = 0
    for unit, place in zip(units, assignment.places, strict=True):
        if place in left:
            left[place] -= unit.total_bytes
        else:
            staying_bytes += unit.staying_bytes
    if staying_bytes > max(left.values()):
        warnings.warn(
            f"Current model requires {staying_bytes} bytes of buffer for offloaded layers, which seems does not fit any GPU's remaining "
            "memory. If you are experiencing a OOM later, please consider using offload_buffers=True.",
            UserWarning,
            stacklevel=3,
        )
