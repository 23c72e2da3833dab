"""Which modules' forwards bring each offloaded tensor: the unit around it or, where the ring is too small for whole units, a part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

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


_RING_SHARE = 0.5
"""Of what is free, what a ring takes that nobody has sized: the rest is for activations. Parts travel about as well as blocks."""


@dataclass(slots=True)
class Bringing:
    """For every device that tensors pass through, who brings them."""

    plan: Cut
    ring_bytes: int | None
    """Room to pass through on each device; None for what `cut` finds."""
    _passing: dict[torch.device, dict[str, int]] = field(default_factory=dict)
    _tensors: dict[torch.device, list[tuple[tuple[str, ...], int]]] = field(default_factory=dict)
    _parts: dict[tuple[torch.device, str], Bringers] = field(default_factory=dict)

    def add(self, device: torch.device, names: Iterable[str], nbytes: int) -> None:
        """Tensors (one, under several names) that take `nbytes` of the ring on `device` while they are there; 0 if they need no copy."""
        aligned_bytes = -(-nbytes // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES
        together = tuple(names)
        self._tensors.setdefault(device, []).append((together, aligned_bytes))
        self._passing.setdefault(device, {}).update(dict.fromkeys(together, aligned_bytes))

    def cut(self, free_bytes: Callable[[torch.device], int]) -> dict[torch.device, int]:
        """The rings that have a limit, in bytes by device; units are cut into parts where it asks for it.

        Without `ring_bytes`, two whole groups pass where `free_bytes` (of a device, once all resident weights are there) has room for them
        and for activations. Otherwise the ring takes its share of what is free, at least the least that any cut needs.

        Raises `DispatchError` where a ring is smaller than that, or less is free.
        """
        rings: dict[torch.device, int] = {}
        needed: dict[torch.device, SmallestRing] = {}
        for device in self._passing:
            if self.ring_bytes is not None:
                ring_bytes, needed[device] = self.ring_bytes, self._smallest_on(device)
            else:
                share_bytes = int(_RING_SHARE * (free := free_bytes(device)))
                if self._two_groups_bytes(device) <= share_bytes:
                    continue
                needed[device] = self._smallest_on(device)
                if free < needed[device].nbytes:
                    raise DispatchError(_too_full(needed[device], free, device))
                ring_bytes = max(needed[device].nbytes, share_bytes)
            rings[device] = ring_bytes
        worst = max(needed, key=lambda each: needed[each].nbytes, default=None)
        if worst is not None and rings[worst] < needed[worst].nbytes:
            raise DispatchError(_too_small(needed[worst], rings[worst], worst))
        for device, ring_bytes in rings.items():
            self._cut_on(device, ring_bytes, needed[device])
        return rings

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

    def _two_groups_bytes(self, device: torch.device) -> int:
        """What the two largest groups take if nothing is cut, and twice the largest of those that stay meanwhile."""
        sizes: dict[Brought, int] = {}
        for names, nbytes in self._tensors[device]:
            if not all(self.plan.reads_rows(name) for name in names):
                by = frozenset((self.plan.unit(name),) for name in names)
                sizes[by, device] = sizes.get((by, device), 0) + nbytes
        beside = self.beside(sizes)
        return 2 * sum(
            max((nbytes for each, nbytes in sizes.items() if (each in beside) == is_beside), default=0) for is_beside in (False, True)
        )

    def _passes(self, device: torch.device, name: str) -> bool:
        return name in self._passing[device] and not self.plan.reads_rows(name)

    def _units_on(self, device: torch.device) -> tuple[dict[str, nn.Module], Callable[[str, torch.Tensor], int], int]:
        """The units that pass through, the room that each of their tensors takes, and what modules around the units hold themselves."""
        passing, cuttable = self._passing[device], set(self.plan.units)
        unit_of = {name: self.plan.unit(name) for name in passing if not self.plan.reads_rows(name)}
        holders = [unit_of[name] for name, nbytes in passing.items() if nbytes and name in unit_of]
        units = {name: self.plan.model.get_submodule(name) for name in dict.fromkeys(holders)}
        units = {name: module for name, module in units.items() if name in cuttable or not any(module.children())}
        around_bytes = sum(passing[name] for name, unit in unit_of.items() if unit not in units)
        return units, lambda name, _: passing[name] if name in unit_of else 0, around_bytes

    @property
    def _whole(self) -> set[str]:
        return {*self.plan.atoms, *self.plan.preloaded}

    def _smallest_on(self, device: torch.device) -> SmallestRing:
        units, nbytes, _ = self._units_on(device)
        return smallest_ring(units, nbytes, slots=1, whole=self._whole)

    def _cut_on(self, device: torch.device, ring_bytes: int, smallest: SmallestRing) -> None:
        units, nbytes, around_bytes = self._units_on(device)
        # What modules around the units hold themselves stays while units pass.
        held_bytes = min(around_bytes, ring_bytes - smallest.nbytes)
        for part in parts_for(units, nbytes, ring_bytes, whole=self._whole, held_bytes=held_bytes):
            bringers = tuple(dict.fromkeys(self.plan.first_name(module) for module in part.modules))
            self._parts |= {(device, name): bringers for name in part.tensors if self._passes(device, name)}


def _uncuttable(smallest: SmallestRing, device: torch.device) -> str:
    held = f", beside {smallest.held_bytes} bytes that the modules around it hold meanwhile" if smallest.held_bytes else ""
    return f"{smallest.module or 'the model'}, which takes {smallest.module_bytes} bytes on {device} and cannot be cut further{held}"


def _too_small(smallest: SmallestRing, ring_bytes: int, device: torch.device) -> str:
    return (
        f"ring_bytes={ring_bytes} is too small for {_uncuttable(smallest, device)}: "
        f"give at least {smallest.nbytes} bytes, or twice that for copies to overlap with arithmetic."
    )


def _too_full(smallest: SmallestRing, free_bytes: int, device: torch.device) -> str:
    return (
        f"{device} has {max(free_bytes, 0)} bytes free beside its resident weights, too little for {_uncuttable(smallest, device)}: "
        f"free at least {smallest.nbytes} bytes there, or plan again with less memory for it (max_memory)."
    )
