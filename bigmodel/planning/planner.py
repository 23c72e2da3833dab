"""`plan`: decides where every weight shall live. What it asks of the other files is all in `_solved`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn

from ..collecting import without_collecting
from ..devices import DeviceKey, computing_key
from ..errors import PlanError
from ..protocols import WeightFormat
from ..text import bytes_text
from .advice import advise
from .cutting import cut_where_nothing_else_works
from .device_maps import clean_device_map
from .execution import execution_note, run_where_it_is_faster
from .infer import map_entries, refuse_unplaced
from .items import Inventory, Travel, Unit, buffer_bytes, join_tied, largest_part
from .memory import measured_budgets, parse_budgets
from .needs import Needs, Workload
from .objective import choose
from .plan import DeviceUse, Plan
from .predicting import MachineLike, case_of, find_machine
from .request import Request
from .shared_work import SharedWork
from .sizes import DtypeLike
from .solver import Assignment, assign, least_ring_bytes, ring_bytes
from .table import binding_uses, devices_text

__all__ = ["plan"]


@without_collecting()
def plan(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    *,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    mode: str = "auto",
    offload_buffers: bool = False,
    weight_format: WeightFormat | None = None,
    batch: int = 1,
    context: int | None = None,
    cache_dtype: DtypeLike | None = None,
    logits: Literal["all", "last"] = "all",
    example_inputs: Any = None,
    formats: Sequence[WeightFormat] = (),
    machine: MachineLike | None = None,
    objective: str | None = None,
    execution: Literal["main", "auto"] = "main",
    advice: bool = True,
) -> Plan:
    """Decides where every weight of `model` (on meta or real) shall live, so that as few bytes as possible travel per step.

    `max_memory` gives bytes per device (`{0: "20GiB", "cpu": 10**10, "disk": "1GB"}`; torch devices and their names work as keys, and
    accelerators that this machine lacks can be planned for). Devices that it does not name are not used, except "disk". Without it the
    machine is measured (`memory.measured_budgets`). `dtype` and `special_dtypes` (by tensor name) are those that loading will use.

    Blocks are modules of `no_split_module_classes`, else those found by `modules.find_blocks`. They are only split where no map with whole
    ones works, and the plan says so. Tied weights stay together and count once. Where something has to be offloaded, embeddings that are
    not tied go first: a step reads single rows of them.

    `mode`: "auto" and "balanced" fill accelerators evenly if everything fits, "balanced_low_0" leaves the first as empty as it can be,
    "sequential" fills one after the other. With `offload_buffers` the buffers of offloaded modules travel too; if the main device has no
    room for them otherwise, the plan does so by itself and says it.

    `weight_format` packs weights on the way. With `context` (tokens per sequence) the plan keeps room for a run of `batch` sequences: the
    KV cache (in `cache_dtype`, by default that of the activations), activations, and logits of all tokens, or with `logits="last"` of the
    last one, as transformers' `generate` computes them. `example_inputs` (a tensor, a sequence or a mapping of arguments) stand in for
    tokens where a model takes something else. Without either, budgets are for weights alone: explicit ones are taken whole, measured ones
    leave 5 % of an accelerator and 10 % of RAM for all of that.
    `advice` says what would help where something travels, which takes some more plans; `formats` are the packed formats it may propose.

    `machine` says how fast the devices are, for `Plan.prediction`: a `Machine`, "measured" (what `bigmodel bench` kept), or names of
    accelerators ("RTX 4090" for all, `{0: "RTX 4090", 1: "T4"}`); without it what is known of this machine. With `objective` "latency" the
    plan leaves out devices that a step is expected to be faster without; with "throughput" it takes the batch (`batch` or more) that is
    expected to give the most tokens per second within the budgets. Without it, fewest bytes moved is all that counts.
    With `execution="auto"` blocks and leaf modules that rest in RAM run there ("cpu:resident" in the map) where a step is expected to take
    less that way; with "main" everything that is offloaded runs on the main device.

    Raises `PlanError` (a ValueError) for a model without tensors, an unknown device or mode, a size that cannot be read, a host budget
    that leaves no room for the largest group to pass through, and a "disk" budget that leaves something without a place.
    """
    budgets = measured_budgets() if max_memory is None else parse_budgets(max_memory)
    request = Request(
        model,
        budgets,
        no_split_module_classes,
        dtype,
        special_dtypes,
        weight_format,
        mode,
        offload_buffers,
        Workload(batch, context, cache_dtype, logits, example_inputs),
        find_machine(machine, budgets),
        objective,
        execution,
    )
    solve = partial(_solved, work=SharedWork())
    request, found = choose(request, solve)
    return replace(found, advice=advise(request, found, solve, formats)) if advice else found


def _solved(request: Request, work: SharedWork) -> Plan:
    """The plan without advice."""
    budgets, offload_buffers = request.budgets, request.offload_buffers
    inventory, needs = work.inventory(request), work.needs(request)
    notes = [*work.packing_notes(request), *needs.notes]

    def assigned(units: Sequence[Unit]) -> Assignment:
        return assign(units, budgets, mode=request.mode, workspace_bytes=needs.workspace_bytes)

    units = join_tied(inventory, Travel(offload_buffers), needs.state_bytes)
    assignment = assigned(units)
    if not offload_buffers and assignment.main != _first_compute(budgets) and any(inventory.buffers.values()):
        travelling = join_tied(inventory, Travel(True), needs.state_bytes)
        with_buffers = assigned(travelling)
        if with_buffers.main != assignment.main:
            units, assignment, offload_buffers = travelling, with_buffers, True
            notes.append(f"Buffers of offloaded modules travel with them: device {assignment.main!r} has no room to keep them all.")
    cut = cut_where_nothing_else_works(
        inventory, assignment, budgets, lambda each: join_tied(each, Travel(offload_buffers), needs.state_bytes), assigned
    )
    if cut is not None:
        inventory, units, assignment = cut.inventory, cut.units, cut.assignment
        notes.append(cut.note)
    refuse_unplaced(units, assignment, budgets)
    case = None
    if request.machine is not None:
        facts = work.facts(request)
        case = case_of(request, request.machine, facts, inventory, units, assignment, offload_buffers)
        if request.execution == "auto":
            chosen = run_where_it_is_faster(request, case, units, assignment, needs.workspace_bytes)
            if chosen is not assignment:
                before, assignment = case.predicted(case.stages), chosen
                case = case_of(request, request.machine, facts, inventory, units, assignment, offload_buffers)
                notes.append(execution_note(assignment, before, case.predicted(case.stages)))
    notes += _passage_notes(units, assignment, budgets, needs)
    found = _described(request, inventory, needs, units, assignment, offload_buffers, notes)
    return found if case is None else replace(found, prediction=case.predicted(case.stages))


def _first_compute(budgets: Mapping[DeviceKey, int]) -> DeviceKey:
    return next((key for key, budget in budgets.items() if key not in ("cpu", "disk") and budget > 0), "cpu")


def _passage_notes(units: Sequence[Unit], assignment: Assignment, budgets: Mapping[DeviceKey, int], needs: Needs) -> list[str]:
    """What to say about the room to pass through. Raises `PlanError` where there is none on any device."""
    notes: list[str] = []
    needed_bytes = least_ring_bytes(units) + sum(unit.staying_bytes for unit in units) + needs.workspace_bytes
    run_bytes = sum(unit.state_bytes for unit in units) + needs.workspace_bytes
    run_text = f", {bytes_text(run_bytes)} of them for the run (a smaller batch or context takes less)" if run_bytes else ""
    name = largest_part(units) or "the model"
    first = _first_compute(budgets)
    if first != "cpu" and assignment.main == "cpu":
        notes.append(
            f"Everything runs on the CPU: no accelerator has room for the largest part to pass through ({name}, "
            f"{bytes_text(needed_bytes)}{run_text}; device {first!r} offers {bytes_text(budgets[first])})."
        )
    if not assignment.can_run:
        if "cpu" in budgets:
            largest_budget = max(budget for key, budget in budgets.items() if key != "disk")
            raise PlanError(
                f"No device can run this model: {name} needs {needed_bytes:,} bytes to pass through{run_text}, and the largest budget of a "
                f"device that computes is {largest_budget:,}. Give 'cpu' or an accelerator at least that."
            )
        notes.append(
            f"max_memory gives nothing for 'cpu', where this plan runs: it takes up to {bytes_text(ring_bytes(units, 2))} of RAM there."
        )
        return notes
    stores = {"disk"} if assignment.main == "cpu" else {"cpu", "disk"}
    passing = [unit for unit, place in zip(units, assignment.places, strict=True) if place in stores]
    if assignment.moved_bytes and assignment.slots == 0:
        notes.append(
            f"Blocks travel in parts, as the reserve ({bytes_text(assignment.reserve_bytes)}) allows: two whole ones "
            f"({bytes_text(ring_bytes(passing, 2))}) would let more bytes travel."
        )
    elif assignment.slots == 1 and ring_bytes(passing, 2) > ring_bytes(passing, 1):
        notes.append(
            "Room for one group at a time: copies and arithmetic take turns. Some more memory on the main device lets them overlap."
        )
    return notes


def _described(
    request: Request,
    inventory: Inventory,
    needs: Needs,
    units: Sequence[Unit],
    assignment: Assignment,
    offload_buffers: bool,
    notes: Sequence[str],
) -> Plan:
    main, budgets = assignment.main, request.budgets
    stores = {"disk"} if main == "cpu" else {"cpu", "disk"}
    device_map = clean_device_map(map_entries(inventory, units, assignment))
    resident: dict[DeviceKey, int] = {}
    stored: dict[DeviceKey, int] = {}
    state: dict[DeviceKey, int] = {}
    buffers: dict[DeviceKey, int] = {}
    staying_bytes = 0
    for unit, rests_on in zip(units, assignment.places, strict=True):
        place = computing_key(rests_on)
        if rests_on in stores:
            stored[place] = stored.get(place, 0) + unit.stored_bytes
            staying_bytes += unit.staying_bytes - unit.state_bytes
        else:
            resident[place] = resident.get(place, 0) + unit.total_bytes - unit.state_bytes
            buffers[place] = buffers.get(place, 0) + buffer_bytes(unit, inventory)
        if unit.state_bytes:
            runs_on = main if rests_on in stores else place
            state[runs_on] = state.get(runs_on, 0) + unit.state_bytes
    computing = {main, *resident}
    keys = list(dict.fromkeys([*budgets, *(key for key in (main, *map(computing_key, assignment.places)) if key not in budgets)]))
    devices = tuple(
        DeviceUse(
            key,
            budgets.get(key),
            resident.get(key, 0),
            stored.get(key, 0),
            staying_bytes if key == main else 0,
            assignment.reserve_bytes if key == main else 0,
            state.get(key, 0),
            needs.workspace_bytes if key in computing else 0,
            buffers.get(key, 0),
            tuple(name for name, device in device_map.items() if computing_key(device) == key),
        )
        for key in sorted(keys, key=lambda key: (isinstance(key, str), ("mps", "cpu", "disk").index(key) if isinstance(key, str) else key))
    )
    stored_bytes = sum(stored.values())
    use = next(use for use in devices if use.device == main)
    return Plan(
        model=type(request.model).__name__,
        device_map=device_map,
        main_device=main,
        devices=devices,
        total_bytes=inventory.total_bytes,
        moved_bytes=assignment.moved_bytes,
        ring_slots=assignment.slots,
        binding=f"memory of {devices_text([each.device for each in binding_uses(main, devices)])}" if stored_bytes else "",
        short_bytes=max(0, stored_bytes - (use.left_bytes or 0) - use.reserve_bytes) if stored_bytes else 0,
        offload_buffers=offload_buffers,
        blocks=tuple(inventory.blocks),
        is_optimal=assignment.is_optimal,
        weight_format="" if request.weight_format is None else request.weight_format.name,
        batch=request.workload.batch,
        context=request.workload.context,
        notes=tuple(notes),
    )
