"""From a device map to decisions: where every tensor rests, where it runs, and which module's forward brings it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..device_map import covering_entry
from ..devices import DeviceKey, as_device
from ..errors import DispatchError
from ..modules import READ_THEIR_CHILDREN, find_blocks, reads_rows_only, runs_itself
from ..text import listed
from .layout import Owner

__all__ = ["Cut", "Registered", "ancestors", "cut", "distinct_owners", "registered_tensors"]


@dataclass(slots=True)
class Registered:
    """One distinct tensor of a model with all places where it is registered."""

    tensor: torch.Tensor
    places: list[tuple[str, Owner]] = field(default_factory=list)
    """Every full name, with the module's dict behind it; a shared module gives several names for one dict."""
    persistent: bool = True

    @property
    def name(self) -> str:
        return self.places[0][0]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.places]

    @property
    def owners(self) -> list[Owner]:
        return distinct_owners(self.places)

    def by_owner(self) -> list[list[tuple[str, Owner]]]:
        """The places, those of one module together."""
        grouped: dict[tuple[int, str], list[tuple[str, Owner]]] = {}
        for place in self.places:
            grouped.setdefault((id(place[1].table), place[1].attribute), []).append(place)
        return list(grouped.values())

    @property
    def is_buffer(self) -> bool:
        return self.places[0][1].is_buffer


def distinct_owners(places: Iterable[tuple[str, Owner]]) -> list[Owner]:
    """The owners among the places, each once."""
    return list({(id(owner.table), owner.attribute): owner for _, owner in places}.values())


def registered_tensors(model: nn.Module) -> list[Registered]:
    """Every distinct parameter and buffer, in the model's order, ties under all their names."""
    found: dict[int, Registered] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for is_buffer, table in ((False, module._parameters), (True, module._buffers)):
            for attribute, tensor in table.items():
                if tensor is None:
                    continue
                entry = found.setdefault(id(tensor), Registered(tensor))
                entry.places.append((f"{path}.{attribute}" if path else attribute, Owner(module, attribute, is_buffer)))
                if is_buffer and attribute in module._non_persistent_buffers_set:
                    entry.persistent = False
    return list(found.values())


@dataclass(slots=True)
class Cut:
    """A device map applied to a model: for every name of a tensor where it rests and runs, and the units that groups are made of."""

    model: nn.Module
    device_map: Mapping[str, DeviceKey]
    main_device: torch.device
    units: list[str]
    """Modules whose tensors travel together, outermost only: blocks, and modules that read their children's weights."""
    blocks: set[str]
    atoms: list[str]
    """Among the units, modules that read their children's weights."""
    preloaded: set[str]
    """Modules whose weights all come with their own forward, as the caller asked for."""
    first_names: dict[int, str]
    """Every module's first name, by the module's id."""

    def entry(self, name: str) -> str:
        """The map entry that covers a tensor or module. Raises `DispatchError`."""
        entry = self._covering(name)
        if entry is None:
            raise DispatchError(f"The device map has no entry that covers {name!r}: add one, or '' for everything that is left.")
        return entry

    def _covering(self, name: str) -> str | None:
        # A module that reads its children's weights is never cut: they are where it is.
        whole = next((atom for atom in self.atoms if _is_within(name, atom)), None)
        if whole is None:
            return covering_entry(name, self.device_map)
        entry = covering_entry(whole, self.device_map)
        return entry if entry is not None else self._fastest_within(whole)

    def _fastest_within(self, module: str) -> str | None:
        """Where a map names only parts of a module that is never cut: the entry that is nearest to the arithmetic speaks for all."""

        def distance(entry: str) -> int:
            return {"cpu": 1, "disk": 2}.get(str(self.device_map[entry]), 0)

        return min((entry for entry in self.device_map if _is_within(entry, module)), key=distance, default=None)

    def rests(self, name: str) -> str:
        """`"resident"`, `"cpu"` or `"disk"`."""
        key = self.device_map[self.entry(name)]
        if key == "disk" or (key == "cpu" and self.main_device.type != "cpu"):
            return str(key)
        return "resident"

    def runs(self, name: str) -> torch.device:
        """The execution device of a tensor's or module's forward."""
        entry = self._covering(name)
        key = None if entry is None else self.device_map[entry]
        if key in ("cpu", "disk"):
            # An offloaded part of a block that is resident on some accelerator runs there, with the rest of the block.
            around = next((block for block in self.blocks if name != block and _is_within(name, block)), None)
            return self.main_device if around is None else self.runs(around)
        return self.main_device if key is None else as_device(key)

    def tensor_runs(self, name: str) -> torch.device:
        """The execution device of a tensor. The root module runs on the main device, so what it holds itself does too."""
        return self.runs(name) if "." in name else self.main_device

    def unit(self, name: str) -> str:
        """The module whose forward brings the tensor `name`: the unit around it, or else the module that holds it directly."""
        holder = name.rpartition(".")[0]
        inside = next((unit for unit in self.units if _is_within(holder, unit)), holder)
        # Rows of an embedding are read where they rest: its table would only take up room among what a block brings.
        if inside in self.blocks and inside not in self.preloaded and reads_rows_only(self.model.get_submodule(holder)):
            inside = holder
        return self.first_name(inside)

    def first_name(self, module: str) -> str:
        """The first name of a module: one that stands in two places is one unit."""
        return self.first_names[id(self.model.get_submodule(module))]

    def reads_rows(self, name: str) -> bool:
        """Whether the module that holds the tensor `name` brings rows of it, and never the whole."""
        holder = name.rpartition(".")[0]
        return self.unit(name) == self.first_name(holder) and reads_rows_only(self.model.get_submodule(holder))

    def within_unit(self, name: str) -> bool:
        """Whether the module `name` is a unit, or a part of one."""
        return any(_is_within(name, unit) for unit in self.units)

    def within_block(self, name: str) -> bool:
        """Whether the module `name` is a part of a block (and not one itself)."""
        return any(name != block and _is_within(name, block) for block in self.blocks)

    def boundaries(self) -> Iterator[str]:
        """Names of the modules at which arguments may have to change devices: those of map entries, and the blocks below them.

        A container without a forward of its own stands for its children.
        """
        seen: set[str] = set()
        for entry in self.device_map:
            try:
                module = self.model.get_submodule(entry)
            except AttributeError:
                continue  # a tensor's own name, or nothing of this model
            for name in _runnable(module, entry):
                inside = [unit for unit in self.units if _is_within(unit, name) and self._covering(unit) == entry]
                for boundary in (name, *inside):
                    if boundary not in seen:
                        seen.add(boundary)
                        yield boundary

    def holders(self) -> Iterator[tuple[str, str, torch.device]]:
        """Modules with tensors of their own, from the root down: a path to it, its first name, and where it runs."""
        for path, module in self.model.named_modules(remove_duplicate=False):
            own = [*module._parameters, *module._buffers]
            if own:
                name = self.first_names[id(module)]
                yield path, name, self.tensor_runs(f"{name}.{own[0]}" if name else own[0])


def _is_within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def ancestors(name: str) -> list[str]:
    """The names of the modules around the module `name`, the root left out."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _runnable(module: nn.Module, name: str) -> Iterator[str]:
    if runs_itself(module):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _runnable(child, f"{name}.{child_name}" if name else child_name)


def _outermost(names: Collection[str]) -> list[str]:
    chosen: list[str] = []
    for name in sorted(set(names)):
        if not any(_is_within(name, other) for other in chosen):
            chosen.append(name)
    return chosen


def cut(
    model: nn.Module,
    device_map: Mapping[str, DeviceKey],
    main_device: torch.device,
    *,
    no_split_module_classes: Collection[str] | str | None = None,
    preload_module_classes: str | Collection[str] | None = None,
) -> Cut:
    """Applies the map to the model. Nothing is changed. Raises `DispatchError` for a parameter that no entry covers."""
    blocks = find_blocks(model, no_split_module_classes)
    classes = set(listed(preload_module_classes))
    preloaded = {name for name, module in model.named_modules() if type(module).__name__ in classes}
    atoms = {name for name, module in model.named_modules() if isinstance(module, READ_THEIR_CHILDREN)}
    units = {*blocks, *atoms, *preloaded}
    first_names = {id(module): name for name, module in model.named_modules()}
    result = Cut(model, device_map, main_device, _outermost(units), set(blocks), _outermost(atoms), preloaded, first_names)
    for name, _ in model.named_parameters(remove_duplicate=False):
        result.entry(name)
    return result
