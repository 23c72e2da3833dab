"""Which modules' forwards bring each offloaded tensor: the unit around it or, where the ring is too small for whole units, a part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..constants import GROUP_ALIGNMENT_BYTES
from ..errors import DispatchError
from ..modules import reads_rows_only
from ..parts import SmallestRing, parts_for, smallest_ring
from .cut import Cut, ancestors

__all__ = ["Bringers", "Bringing", "Brought", "modules_of", "name_of"]

Bringers: TypeAlias = tuple[str, ...]
"""First names of the modules that bring some tensors, each of them all; in the order of the model."""

Brought: TypeAlias = tuple[frozenset[Bringers], torch.device]
"""What a group is made by: tensors with the same bringers (several for one that is tied across parts) that run on the same device."""


def modules_of(by: frozenset[Bringers]) -> list[str]:
    """All modules among the bringers of a group."""
    return sorted({module for bringers in by for module in bringers})


def name_of(by: frozenset[Bringers]) -> str:
    """What a group with these bringers is called: the module, or the first and the last of the neighbours."""
    first, *others = min(by, key=lambda bringers: (len(bringers[0]), bringers))
    return f"{first} … {others[-1]}" if others else first


@dataclass(slots=True)
class Bringing:
    """For every device that tensors pass through, who brings them."""

    plan: Cut
    ring_bytes: int | None
    """Room to pass through on each device; None for as much as whole units take."""
    _passing: dict[torch.device, dict[str, int]] = field(default_factory=dict)
    _parts: dict[tuple[torch.device, str], Bringers] = field(default_factory=dict)

    def add(self, device: torch.device, names: Iterable[str], nbytes: int) -> None:
        """Tensors (one, under several names) that take `nbytes` of the ring on `device` while they are there; 0 if they need no copy."""
        aligned_bytes = -(-nbytes // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES
        self._passing.setdefault(device, {}).update(dict.fromkeys(names, aligned_bytes))

    def cut(self) -> None:
        """Cuts units into parts where the ring asks for it. Raises `DispatchError` for a ring that no cut makes large enough."""
        if self.ring_bytes is None:
            return
        needed = {device: self._cut_on(device, self.ring_bytes) for device in self._passing}
        device = max(needed, key=lambda each: needed[each].nbytes, default=None)
        if device is not None and self.ring_bytes < needed[device].nbytes:
            raise DispatchError(_too_small(needed[device], self.ring_bytes, device))

    def bringers(self, device: torch.device, name: str) -> Bringers:
        """The modules that bring the tensor `name` to `device`."""
        part = self._parts.get((device, name))
        return part if part is not None else (self.plan.unit(name),)

    def beside(self, groups: Collection[Brought]) -> set[Brought]:
        """Those that are in use while others are: what is tied across modules, and what modules around others hold themselves."""
        brought: dict[tuple[str, torch.device], int] = {}
        around: set[tuple[str, torch.device]] = set()
        for by, device in groups:
            for module in modules_of(by):
                brought[module, device] = brought.get((module, device), 0) + 1
                if not reads_rows_only(self.plan.model.get_submodule(module)):
                    around |= {(above, device) for above in ["", *ancestors(module)] if above != module}
        return {
            (by, device)
            for by, device in groups
            for module in modules_of(by)
            if (module, device) in around or (len(by) > 1 and brought[module, device] > 1)
        }

    def _cut_on(self, device: torch.device, ring_bytes: int) -> SmallestRing:
        """Cuts what passes through on one device, if the ring is large enough for that; returns how large it has to be."""
        passing = self._passing[device]
        model, cuttable = self.plan.model, set(self.plan.units)
        unit_of = {name: self.plan.unit(name) for name in passing if not self.plan.reads_rows(name)}
        holders = [unit_of[name] for name, nbytes in passing.items() if nbytes and name in unit_of]
        units = {name: model.get_submodule(name) for name in dict.fromkeys(holders)}
        units = {name: module for name, module in units.items() if name in cuttable or not any(module.children())}
        whole = {*self.plan.atoms, *self.plan.preloaded}

        def nbytes(name: str, _: torch.Tensor) -> int:
            return passing[name] if name in unit_of else 0

        smallest = smallest_ring(units, nbytes, slots=1, whole=whole)
        if ring_bytes < smallest.nbytes:
            return smallest
        # What modules around the units hold themselves stays while units pass.
        around_bytes = sum(passing[name] for name, unit in unit_of.items() if unit not in units)
        held_bytes = min(around_bytes, ring_bytes - smallest.nbytes)
        for part in parts_for(units, nbytes, ring_bytes, whole=whole, held_bytes=held_bytes):
            bringers = tuple(dict.fromkeys(self.plan.first_name(module) for module in part.modules))
            self._parts |= {(device, name): bringers for name in part.tensors if name in unit_of}
        return smallest


def _too_small(smallest: SmallestRing, ring_bytes: int, device: torch.device) -> str:
    held = f", beside {smallest.held_bytes} bytes that the modules around it hold meanwhile" if smallest.held_bytes else ""
    return (
        f"ring_bytes={ring_bytes} is too small for {smallest.module or 'the model'}, which takes {smallest.module_bytes} bytes on {device} "
        f"and cannot be cut further{held}: give at least {smallest.nbytes} bytes, or twice that for copies to overlap with arithmetic."
    )
