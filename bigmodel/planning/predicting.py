"""The prediction of a plan: the machine that is meant, and the cost model applied to where everything goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from ..constants import GROUP_ALIGNMENT_BYTES
from ..device_map import device_for
from ..devices import DeviceKey, accelerators, as_key, computing_key, device_name
from ..errors import MachineError, PlanError
from ..machine import Machine
from ..measuring import kept_machine
from ..parts import smallest_ring
from .cost import Forward, Moving, Prediction, Run, Stage, forward, predict
from .hardware import named_machine
from .items import Inventory, Unit, find_items
from .request import Request
from .sizes import tensor_bytes_rule
from .solver import Assignment
from .stages import ModelFacts, facts_of, run_of, stages_of
from .table import device_text

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Case", "MachineLike", "case_of", "find_machine", "predict_forward"]

MachineLike: TypeAlias = Machine | str | Sequence[str] | Mapping[object, str]
"""Rates, `"measured"`, or names of accelerators (`planning.hardware`): one for all, one after the other, or by device."""


def find_machine(machine: MachineLike | None, budgets: Mapping[DeviceKey, int]) -> Machine | None:
    """The machine that is meant. None where nothing is named and nothing is known of the devices that `budgets` offers.

    Without a name: the kept figures of this machine, else the table's where this machine's accelerators are in it. The host of named
    accelerators is this machine where it was measured, else a typical desktop. Raises `PlanError` for `"measured"` where nothing was
    measured, and `MachineError` for a name that the table does not have.
    """
    kept = None if isinstance(machine, Machine) else kept_machine()
    if machine is None:
        found = kept or _looked_up()
        return found if found is not None and not _unknown(found, budgets) else None
    if machine == "measured" and kept is None:
        raise PlanError("machine='measured', but this machine has not been measured yet: run `bigmodel bench` once.")
    found = _named(machine, budgets, kept)
    unknown = ", ".join(map(device_text, _unknown(found, budgets)))
    if unknown:
        raise MachineError(f"The machine has no rates for {unknown}, only for {', '.join(map(device_text, found.devices))}.")
    return found


def _named(machine: MachineLike, budgets: Mapping[DeviceKey, int], kept: Machine | None) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if machine == "measured":
        assert kept is not None
        return kept
    if isinstance(machine, str):
        return named_machine(dict.fromkeys(_accelerators(budgets), machine), kept)
    if isinstance(machine, Mapping):
        return named_machine({as_key(device, where="in machine"): name for device, name in machine.items()}, kept)
    return named_machine(machine, kept)


def _accelerators(budgets: Mapping[DeviceKey, int]) -> list[DeviceKey]:
    return [key for key in budgets if key not in ("cpu", "disk")]


def _unknown(machine: Machine, budgets: Mapping[DeviceKey, int]) -> list[DeviceKey]:
    """The devices that might compute and that the machine has no rates for."""
    return [key for key in (*_accelerators(budgets), "cpu") if key not in machine.devices]


def _looked_up() -> Machine | None:
    """This machine by the names of its accelerators; None where it has none, or the table lacks one."""
    names = {as_key(device): device_name(device) for device in accelerators()}
    try:
        return named_machine(names) if names else None
    except MachineError:
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """An assignment as the cost model sees it."""

    stages: Sequence[Stage]
    machine: Machine
    run: Run
    moving: Moving
    context: int | None

    def predicted(self, stages: Sequence[Stage]) -> Prediction:
        """Seconds that these stages are expected to take under the same circumstances."""
        return predict(stages, self.machine, self.run, self.moving, self.context)


def case_of(
    request: Request,
    machine: Machine,
    facts: ModelFacts,
    inventory: Inventory,
    units: Sequence[Unit],
    assignment: Assignment,
    offload_buffers: bool,
) -> Case:
    """What decides how long the assignment takes."""
    machine = _with_others(machine, request.budgets)
    run = run_of(facts, request.dtype, request.workload.batch)
    places = {item.name: place for unit, place in zip(units, assignment.places, strict=True) for item in unit.items}
    state = {unit.items[0].name: unit.state_bytes for unit in units}
    stages = stages_of(facts, inventory, places, assignment.main, offload_buffers=offload_buffers, state_bytes=state)
    moving = Moving(
        assignment.slots,
        overlaps=assignment.slots >= 2 or _fits_two_parts(request.model, stages, inventory, assignment.reserve_bytes),
        cached_bytes=_cached_bytes(machine, request, units, assignment),
    )
    return Case(stages, machine, run, moving, request.workload.context)


def predict_forward(model: nn.Module, plan: Plan, machine: Machine, *, tokens: int, past: int = 0, is_cached: bool = True) -> Forward:
    """One forward of `tokens` new tokens a sequence with `past` behind them, of `model` under its plan, and what it waits for.

    The model has the dtypes that it was planned for. `is_cached`: whether the page cache holds the files of what rests on disk. Raises
    `PlanError` for the plan of another model.
    """
    inventory = find_items(model, tensor_bytes_rule(), None)
    facts = facts_of(model, inventory)
    places: dict[str, DeviceKey] = {}
    for item in inventory.items:
        place = device_for(item.entries[0], plan.device_map)
        if place is None:
            raise PlanError(f"The plan has no place for {item.name!r}: it is of another model ({plan.model}).")
        places[item.name] = place
    stages = stages_of(facts, inventory, places, plan.main_device, offload_buffers=plan.offload_buffers)
    overlaps = plan.ring_slots >= 2 or _fits_two_parts(model, stages, inventory, plan.reserve_bytes)
    run = run_of(facts, None, plan.batch)
    return forward(stages, machine, run, Moving(plan.ring_slots, overlaps), tokens=tokens, past=past, is_cached=is_cached)


def _fits_two_parts(model: nn.Module, stages: Sequence[Stage], inventory: Inventory, reserve_bytes: int) -> bool:
    """Whether the reserve holds two parts of groups that pass."""
    tensors = {name for item in inventory.items if item.entries != (item.name,) for name in item.entries}
    moving = {stage.name for stage in stages if stage.moved_bytes and stage.name not in tensors}
    passing: dict[str, nn.Module] = {}
    alike: dict[object, int] = {}
    for item in inventory.items:
        if item.name in moving:
            kind = (type(item.module), item.layout, tuple(inventory.nbytes[key] for key in item.tensors)) if item.is_block else item.name
            alike[kind] = alike.get(kind, 0) + 1
            if alike[kind] <= 2:  # of blocks that are alike, no more than two pass at a time
                passing[item.name] = model.get_submodule(item.name)

    def nbytes(_: str, tensor: torch.Tensor) -> int:
        if id(tensor) in inventory.buffers or id(tensor) in inventory.row_tables:
            return 0
        return -(-inventory.nbytes[id(tensor)] // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES

    return smallest_ring(passing, nbytes).nbytes <= reserve_bytes


def _with_others(machine: Machine, budgets: Mapping[DeviceKey, int]) -> Machine:
    """The machine with a card that it lacks (one that advice thinks of) being like its largest."""
    known = [key for key in _accelerators(budgets) if key in machine.devices]
    lacking = [key for key in _accelerators(budgets) if key not in machine.devices]
    if not lacking or not known:
        return machine
    like = machine.devices[max(known, key=lambda key: budgets[key])]
    return replace(machine, devices={**machine.devices, **dict.fromkeys(lacking, like)})


def _cached_bytes(machine: Machine, request: Request, units: Sequence[Unit], assignment: Assignment) -> int | None:
    """What the plan leaves of the RAM, for the page cache."""
    memory_bytes = machine.devices["cpu"].memory_bytes or request.budgets.get("cpu")
    if memory_bytes is None:
        return None
    used_bytes = sum(unit.total_bytes for unit, place in zip(units, assignment.places, strict=True) if computing_key(place) == "cpu")
    return max(0, memory_bytes - used_bytes - (assignment.reserve_bytes if assignment.main == "cpu" else 0))
