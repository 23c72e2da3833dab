"""Blocks cut at their children: the last resort, where no map with whole blocks works."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..devices import DeviceKey
from ..text import names_text
from .items import Inventory, Unit, with_blocks_cut
from .solver import Assignment

__all__ = ["CutPlan", "cut_where_nothing_else_works"]


@dataclass(frozen=True, slots=True)
class CutPlan:
    """An assignment of a model some of whose blocks were cut."""

    inventory: Inventory
    units: list[Unit]
    assignment: Assignment
    note: str
    """Which blocks lie on several devices, and why."""


def cut_where_nothing_else_works(
    inventory: Inventory,
    assignment: Assignment,
    budgets: Mapping[DeviceKey, int],
    make_units: Callable[[Inventory], list[Unit]],
    assigned: Callable[[Sequence[Unit]], Assignment],
) -> CutPlan | None:
    """The assignment that works once blocks are cut at their children, where `assignment` leaves something without a place or cannot run.

    Blocks larger than every budget are tried first, then all. None where whole blocks do, or where cutting does not help.
    """
    if not assignment.unplaced and assignment.can_run:
        return None
    for names in _candidates(inventory, budgets):
        cut = with_blocks_cut(inventory, names)
        units = make_units(cut)
        found = assigned(units)
        if found.can_run and not found.unplaced:
            return CutPlan(cut, units, found, _note(names, units, found))
    return None


def _candidates(inventory: Inventory, budgets: Mapping[DeviceKey, int]) -> Iterator[set[str]]:
    largest = max((budget for key, budget in budgets.items() if key != "disk"), default=0)
    blocks = {item.name: sum(inventory.nbytes[key] for key in item.tensors) for item in inventory.items if item.is_block}
    too_large = {name for name, nbytes in blocks.items() if nbytes > largest}
    if too_large:
        yield too_large
    if blocks and too_large != set(blocks):
        yield set(blocks)


def _note(names: Collection[str], units: Sequence[Unit], assignment: Assignment) -> str:
    places: dict[str, set[DeviceKey]] = {}
    for unit, place in zip(units, assignment.places, strict=True):
        for item in unit.items:
            block = next((name for name in names if item.name.startswith(f"{name}.")), None)
            if block is not None:
                places.setdefault(block, set()).add(place)
    spread = [block for block, devices in places.items() if len(devices) > 1]
    return f"Cut at their children, since no map with whole blocks works within these budgets: {names_text(spread)}."
