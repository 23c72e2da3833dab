"""`plan`: where every weight shall live, and why."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..devices import DeviceKey
from ..errors import PlanError
from ..text import bytes_text
from .device_maps import clean_device_map
from .infer import map_entries, refuse_unplaced
from .items import Inventory, Unit, find_items, join_tied
from .memory import measured_budgets, parse_budgets
from .sizes import DtypeLike, tensor_bytes_rule
from .solver import Assignment, assign, ring_bytes
from .table import device_text, render

__all__ = ["DeviceUse", "Plan", "plan"]

MODES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device holds under a plan. All figures are bytes."""

    device: DeviceKey
    budget_bytes: int | None
    """What the device offers; None: no limit."""
    resident_bytes: int = 0
    """Weights and buffers that live here and compute here."""
    offloaded_bytes: int = 0
    """Weights and buffers that rest here and compute on the main device."""
    staying_bytes: int = 0
    """Buffers of offloaded modules that do not travel: they stay on the main device."""
    reserve_bytes: int = 0
    """Kept free for offloaded groups that pass through."""
    contents: tuple[str, ...] = ()
    """The entries of the device map that lead here."""

    @property
    def used_bytes(self) -> int:
        """Everything that the plan puts on the device, the reserve too."""
        return self.resident_bytes + self.offloaded_bytes + self.staying_bytes + self.reserve_bytes

    @property
    def left_bytes(self) -> int | None:
        """What is left of the budget; None without a limit."""
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A device map with its reasons. `print(plan)` shows it as a table."""

    model: str
    """Class name of the model."""
    device_map: dict[str, DeviceKey]
    main_device: DeviceKey
    """Where offloaded modules run."""
    devices: tuple[DeviceUse, ...]
    total_bytes: int
    """The model, every tensor once, in the planned dtypes."""
    moved_bytes: int
    """Bytes that travel to the main device in every step (one forward of the model)."""
    ring_slots: int
    """Groups that the reserve has room for: 2 (the next one travels while one computes), 1 (they wait for each other), 0 (none travels)."""
    binding: str
    """The limit that keeps weights from staying on the compute devices; empty if everything stays."""
    short_bytes: int
    """Bytes more on the main device, and everything would stay."""
    offload_buffers: bool
    """Whether the buffers of offloaded modules travel with them; to be passed on to the dispatch."""
    blocks: tuple[str, ...]
    """Modules that were not to be split."""
    is_optimal: bool
    """Whether it is proven that no map within these budgets, and with this reserve, moves fewer bytes."""
    notes: tuple[str, ...] = ()
    """What else the reader should know."""

    @property
    def reserve_bytes(self) -> int:
        """Room kept free on the main device for offloaded groups to pass through: what the dispatch may use there."""
        return sum(use.reserve_bytes for use in self.devices)

    def to_json(self) -> str:
        """The plan as JSON text, for `from_json`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `PlanError` for text that is no plan."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["device_map"] = dict(fields["device_map"])
            fields["devices"] = tuple(DeviceUse(**{**use, "contents": tuple(use["contents"])}) for use in fields["devices"])
            fields["blocks"], fields["notes"] = tuple(fields["blocks"]), tuple(fields["notes"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"This JSON is not a plan written by Plan.to_json ({type(error).__name__}: {error}).") from error

    def __str__(self) -> str:
        return render(self)


def plan(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    *,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    mode: str = "auto",
    offload_buffers: bool = False,
) -> Plan:
    """Decides where every weight of `model` (on meta or real) shall live, so that as few bytes as possible travel per step.

    `max_memory` gives bytes per device (`{0: "20GiB", "cpu": 10**10, "disk": "1GB"}`; torch devices and their names work as keys, and
    accelerators that this machine lacks can be planned for). Devices that it does not name are not used, except "disk". Without it the
    machine is measured (`memory.measured_budgets`). `dtype` and `special_dtypes` (by tensor name) are those that loading will use.

    Blocks are never split: modules of `no_split_module_classes`, else those found by `modules.find_blocks`. Tied weights stay together and
    count once. Where something has to be offloaded, embeddings that are not tied go first: a step reads single rows of them.

    `mode`: "auto" and "balanced" fill accelerators evenly if everything fits, "balanced_low_0" leaves the first as empty as it can be,
    "sequential" fills one after the other. With `offload_buffers` the buffers of offloaded modules travel too; if the main device has no
    room for them otherwise, the plan does so by itself and says it.

    Raises `PlanError` (a ValueError) for a model without tensors, an unknown device or mode, a size that cannot be read, a host budget
    that leaves no room for the largest group to pass through, and a "disk" budget that leaves something without a place.
    """
    if mode not in MODES:
        raise PlanError(f"Mode {mode!r} is unknown. Use one of {', '.join(MODES)}.")
    inventory = find_items(model, tensor_bytes_rule(dtype, special_dtypes), no_split_module_classes)
    budgets = measured_budgets() if max_memory is None else parse_budgets(max_memory)
    notes: list[str] = []
    units = join_tied(inventory, offload_buffers=offload_buffers)
    assignment = assign(units, budgets, mode=mode)
    if not offload_buffers and assignment.main != _first_compute(budgets) and any(inventory.buffers.values()):
        travelling = join_tied(inventory, offload_buffers=True)
        with_buffers = assign(travelling, budgets, mode=mode)
        if with_buffers.main != assignment.main:
            units, assignment, offload_buffers = travelling, with_buffers, True
            notes.append(f"Buffers of offloaded modules travel with them: device {assignment.main!r} has no room to keep them all.")
    refuse_unplaced(units, assignment, budgets)
    notes += _passage_notes(units, assignment, budgets)
    return _described(type(model).__name__, inventory, units, assignment, budgets, offload_buffers, notes)


def _first_compute(budgets: Mapping[DeviceKey, int]) -> DeviceKey:
    return next((key for key, budget in budgets.items() if key not in ("cpu", "disk") and budget > 0), "cpu")


def _passage_notes(units: Sequence[Unit], assignment: Assignment, budgets: Mapping[DeviceKey, int]) -> list[str]:
    """What to say about the room to pass through. Raises `PlanError` where there is none on any device."""
    notes: list[str] = []
    largest = max(units, key=lambda unit: unit.slot_bytes[:1])
    needed_bytes = ring_bytes(units, 1) + sum(unit.staying_bytes for unit in units)
    name = largest.items[0].name or "the model"
    first = _first_compute(budgets)
    if first != "cpu" and assignment.main == "cpu":
        notes.append(
            f"Everything runs on the CPU: no accelerator has room for the largest group to pass through ({name}, "
            f"{bytes_text(needed_bytes)}; device {first!r} offers {bytes_text(budgets[first])})."
        )
    if assignment.main == "cpu" and assignment.slots == 0 and assignment.moved_bytes:
        if "cpu" in budgets:
            largest_budget = max(budget for key, budget in budgets.items() if key != "disk")
            raise PlanError(
                f"No device can run this model: {name} needs {needed_bytes:,} bytes to pass through, and the largest budget of a device "
                f"that computes is {largest_budget:,}. Give 'cpu' or an accelerator at least that."
            )
        notes.append(
            f"max_memory gives nothing for 'cpu', where this plan runs: it takes up to {bytes_text(ring_bytes(units, 2))} of RAM there."
        )
    stores = {"disk"} if assignment.main == "cpu" else {"cpu", "disk"}
    passing = [unit for unit, place in zip(units, assignment.places, strict=True) if place in stores]
    if assignment.slots == 1 and ring_bytes(passing, 2) > ring_bytes(passing, 1):
        notes.append(
            "Room for one group at a time: copies and arithmetic take turns. Some more memory on the main device lets them overlap."
        )
    return notes


def _described(
    model: str,
    inventory: Inventory,
    units: Sequence[Unit],
    assignment: Assignment,
    budgets: Mapping[DeviceKey, int],
    offload_buffers: bool,
    notes: Sequence[str],
) -> Plan:
    main = assignment.main
    stores = {"disk"} if main == "cpu" else {"cpu", "disk"}
    device_map = clean_device_map(map_entries(inventory, units, assignment))
    resident: dict[DeviceKey, int] = {}
    stored: dict[DeviceKey, int] = {}
    staying_bytes = 0
    for unit, place in zip(units, assignment.places, strict=True):
        if place in stores:
            stored[place] = stored.get(place, 0) + unit.stored_bytes
            staying_bytes += unit.staying_bytes
        else:
            resident[place] = resident.get(place, 0) + unit.total_bytes
    keys = list(dict.fromkeys([*budgets, *(key for key in (main, *assignment.places) if key not in budgets)]))
    devices = tuple(
        DeviceUse(
            key,
            budgets.get(key),
            resident.get(key, 0),
            stored.get(key, 0),
            staying_bytes if key == main else 0,
            assignment.reserve_bytes if key == main else 0,
            tuple(name for name, device in device_map.items() if device == key),
        )
        for key in sorted(keys, key=lambda key: (isinstance(key, str), ("mps", "cpu", "disk").index(key) if isinstance(key, str) else key))
    )
    stored_bytes = sum(stored.values())
    use = next(use for use in devices if use.device == main)
    return Plan(
        model=model,
        device_map=device_map,
        main_device=main,
        devices=devices,
        total_bytes=inventory.total_bytes,
        moved_bytes=assignment.moved_bytes,
        ring_slots=assignment.slots,
        binding=f"memory of {device_text(main)}" if stored_bytes else "",
        short_bytes=max(0, stored_bytes - (use.left_bytes or 0) - use.reserve_bytes) if stored_bytes else 0,
        offload_buffers=offload_buffers,
        blocks=tuple(inventory.blocks),
        is_optimal=assignment.is_optimal,
        notes=tuple(notes),
    )
