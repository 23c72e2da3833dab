"""What a plan places: the blocks of a model and the leaf modules and tensors around them, with exact bytes, tied ones joined."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from ..constants import GROUP_ALIGNMENT_BYTES
from ..errors import PlanError
from ..modules import find_blocks, row_tables
from ..parts import smallest_ring
from .sizes import TensorBytes

__all__ = ["Inventory", "Item", "Travel", "Unit", "buffer_bytes", "find_items", "join_tied", "largest_part", "with_blocks_cut"]


class Item(NamedTuple):
    """A module that is placed whole, or the tensors that an inner module holds itself: its forward needs them on one device.

    Models have tens of thousands of items, and a named tuple is made in a fifth of the time that a frozen dataclass takes.
    """

    name: str
    tensors: tuple[int, ...]
    """Identities of its distinct tensors, in order."""
    is_block: bool
    entries: tuple[str, ...]
    """The names that stand for it in a device map: its own, or those of the tensors."""
    module: nn.Module | None = None
    """The module, where it is a block."""
    layout: int = 0
    """Blocks of one class and one layout have the same names inside."""
    is_around_others: bool = False
    """Whether these are tensors that an inner module holds itself: they have to be there while the modules inside it run."""


class Unit(NamedTuple):
    """Items that share tensors, and so live on one device; most units are one item."""

    items: tuple[Item, ...]
    total_bytes: int
    """Everything that it takes on the device where it runs: tensors, shared ones once, and the state of the run."""
    staying_bytes: int
    """Bytes that stay on the main device when the unit is offloaded: buffers that do not travel, and the state of the run."""
    moved_bytes: int
    """Bytes that travel in every step when the unit is offloaded; a tensor that several items use travels for each of them."""
    slot_bytes: tuple[int, ...]
    """Room that the items need to pass through whole, the largest two, the larger first; empty when nothing passes through."""
    part_bytes: int
    """Room that they need at least: for the largest part, where an item is cut as far as it can be (`parts.smallest_ring`)."""
    state_bytes: int = 0
    """State of the run (KV cache, logits), wherever the unit runs; no part of the model."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that rest in the store when the unit is offloaded."""
        return self.total_bytes - self.staying_bytes


@dataclass(slots=True)
class Inventory:
    """All tensors of a model, sized once, and its items in the order of the model."""

    items: list[Item] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    """Bytes of each distinct tensor."""
    buffers: dict[int, bool] = field(default_factory=dict)
    """The tensors that are buffers: whether they are part of the state dict."""
    blocks: list[str] = field(default_factory=list)
    layouts: dict[tuple[str, ...], int] = field(default_factory=dict)
    """The names of the tensors in a block, and the number that stands for them."""
    row_tables: set[int] = field(default_factory=set)
    """Embedding tables of which a step reads the rows that are looked up: they do not travel."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the model, every tensor once."""
        return sum(self.nbytes.values())


def find_items(model: nn.Module, rule: TensorBytes, no_split_module_classes: str | Collection[str] | None = None) -> Inventory:
    """One walk over the model: its blocks, and outside of them its leaf modules and the tensors that inner modules hold themselves.

    Raises `PlanError` for a model without tensors.
    """
    inventory = Inventory(blocks=find_blocks(model, no_split_module_classes), row_tables=row_tables(model))
    blocks = set(inventory.blocks)
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        is_block = name in blocks
        if is_block or not module._modules:
            tensors = _tensors_below(module, name) if module._modules else _own_tensors(module, name)
            if tensors:
                _add(inventory, name, tensors, rule, block=module if is_block else None)
            continue
        own = _own_tensors(module, name)
        if own:
            _add(inventory, own[0][0], own, rule, entries=tuple(tensor_name for tensor_name, _, _ in own))
        stack += reversed([(_join(name, key), child) for key, child in module._modules.items() if child is not None])
    if not inventory.items:
        raise PlanError(f"{type(model).__name__} has no parameters and no buffers: there is nothing to place.")
    return inventory


def with_blocks_cut(inventory: Inventory, names: Collection[str]) -> Inventory:
    """The same inventory with the blocks `names` cut into their children and the tensors that they hold themselves."""
    made = replace(inventory, items=[], blocks=[name for name in inventory.blocks if name not in names], layouts=dict(inventory.layouts))

    def known(name: str, tensor: torch.Tensor) -> int:
        return inventory.nbytes[id(tensor)]

    for item in inventory.items:
        if item.module is None or item.name not in names or not item.module._modules:
            made.items.append(item)
            continue
        own = _own_tensors(item.module, item.name)
        if own:
            _add(made, own[0][0], own, known, entries=tuple(tensor_name for tensor_name, _, _ in own))
        for key, child in item.module._modules.items():
            tensors = [] if child is None else _tensors_below(child, _join(item.name, key))
            if child is not None and tensors:
                _add(made, _join(item.name, key), tensors, known, block=child if child._modules else None)
    return made


def buffer_bytes(unit: Unit, inventory: Inventory) -> int:
    """Bytes of the unit's buffers, shared ones once."""
    if not inventory.buffers:
        return 0
    return sum(inventory.nbytes[key] for key in {key for item in unit.items for key in item.tensors if key in inventory.buffers})


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _own_tensors(module: nn.Module, name: str) -> list[tuple[str, torch.Tensor, bool | None]]:
    """Name, tensor, and for buffers whether they are part of the state dict (None for parameters)."""
    prefix = f"{name}." if name else ""
    own: list[tuple[str, torch.Tensor, bool | None]] = [
        (prefix + key, parameter, None) for key, parameter in module._parameters.items() if parameter is not None
    ]
    if module._buffers:
        computed = module._non_persistent_buffers_set
        own += [(prefix + key, buffer, key not in computed) for key, buffer in module._buffers.items() if buffer is not None]
    return own


def _tensors_below(module: nn.Module, name: str) -> list[tuple[str, torch.Tensor, bool | None]]:
    tensors: list[tuple[str, torch.Tensor, bool | None]] = []
    stack = [(name, module)]
    while stack:
        path, current = stack.pop()
        tensors += _own_tensors(current, path)
        if current._modules:
            prefix = f"{path}." if path else ""
            stack += [(prefix + key, child) for key, child in current._modules.items() if child is not None]
    return tensors


def _add(
    inventory: Inventory,
    name: str,
    tensors: list[tuple[str, torch.Tensor, bool | None]],
    rule: TensorBytes,
    *,
    block: nn.Module | None = None,
    entries: tuple[str, ...] = (),
) -> None:
    keys: dict[int, None] = {}
    for tensor_name, tensor, persistent in tensors:
        key = id(tensor)
        keys[key] = None
        if key not in inventory.nbytes:
            inventory.nbytes[key] = rule(tensor_name, tensor)
            if persistent is not None:
                inventory.buffers[key] = persistent
    layout = 0
    if block is not None:
        inside = tuple([tensor_name[len(name) :] for tensor_name, _, _ in tensors])
        layout = inventory.layouts.setdefault(inside, len(inventory.layouts))
    inventory.items.append(Item(name, tuple(keys), block is not None, entries or (name,), block, layout, bool(entries)))


@dataclass(frozen=True, slots=True)
class Travel:
    """How what is offloaded travels."""

    offload_buffers: bool
    """Whether buffers of the state dict travel with their item; computed ones never do."""
    alignment: int = GROUP_ALIGNMENT_BYTES
    """While a group passes through, each of its tensors starts at a multiple of this."""
    whole_embeddings: bool = False
    """Whether an embedding table travels like any other weight; else its rows are read where it rests."""


def join_tied(inventory: Inventory, travel: Travel, state_bytes: Mapping[str, int] | None = None) -> list[Unit]:
    """The items as units, in the order of the model; items that share a tensor, directly or through others, form one.

    `state_bytes` is what the run keeps beside modules, by name of the module or of one inside it.
    """
    making = _Making(inventory, travel, _state_by_item(inventory, state_bytes or {}))
    if sum(len(item.tensors) for item in inventory.items) == len(inventory.nbytes):  # nothing is shared
        return [making.single(item) for item in inventory.items]
    parent = list(range(len(inventory.items)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    holder: dict[int, int] = {}
    for index, item in enumerate(inventory.items):
        for key in item.tensors:
            first, second = root(holder.setdefault(key, index)), root(index)
            parent[max(first, second)] = min(first, second)
    members: dict[int, list[Item]] = {}
    for index, item in enumerate(inventory.items):
        members.setdefault(root(index), []).append(item)
    return [making.single(items[0]) if len(items) == 1 else making.joined(items) for items in members.values()]


def _state_by_item(inventory: Inventory, state_bytes: Mapping[str, int]) -> dict[str, int]:
    """State by the item that the module is, or is part of; by its first part where it was cut.

    Raises `PlanError` for a module that no item holds.
    """
    if not state_bytes:
        return {}
    names = {item.name for item in inventory.items}
    state: dict[str, int] = {}
    for module, nbytes in state_bytes.items():
        name = module
        while name and name not in names:
            name = name.rpartition(".")[0]
        if name not in names:  # blocks that are smaller than the module: it runs where they do
            name = next((item.name for item in inventory.items if item.name.startswith(f"{module}.")), "")
        if name not in names:
            raise PlanError(f"State of the run is given for module {module!r}, which holds no weights and is part of no block.")
        state[name] = state.get(name, 0) + nbytes
    return state


def largest_part(units: Sequence[Unit]) -> str:
    """The name of the module that needs the most room to pass through: it cannot be cut any further."""
    largest = max(units, key=lambda unit: unit.part_bytes)
    blocks = {item.name: item.module for item in largest.items if item.module is not None}
    if len(blocks) < len(largest.items):
        return largest.items[0].name
    return smallest_ring(blocks, lambda _, tensor: tensor.nbytes, slots=1).module


class _Making:
    """Makes units. Items of equal tensors are counted once."""

    def __init__(self, inventory: Inventory, travel: Travel, state: Mapping[str, int]) -> None:
        self._inventory = inventory
        self._travel = travel
        self._state = state
        staying = {key for key, persistent in inventory.buffers.items() if not (travel.offload_buffers and persistent)}
        self._staying = staying
        self._resting = staying if travel.whole_embeddings else staying | inventory.row_tables
        """Tensors that do not travel."""
        self._passing: dict[object, tuple[int, int, int]] = {}

    def single(self, item: Item) -> Unit:
        nbytes, state = self._inventory.nbytes, self._state.get(item.name, 0) if self._state else 0
        total_bytes = sum([nbytes[key] for key in item.tensors])
        staying_bytes = sum([nbytes[key] for key in item.tensors if key in self._staying]) if self._staying else 0
        if item.is_around_others:
            return Unit((item,), total_bytes + state, total_bytes + state, 0, (), 0, state)
        moved, slot, part = self._passing_bytes(item)
        return Unit((item,), total_bytes + state, staying_bytes + state, moved, (slot,) if slot else (), part, state)

    def joined(self, items: Sequence[Item]) -> Unit:
        nbytes = self._inventory.nbytes
        distinct = dict.fromkeys(key for item in items for key in item.tensors)
        state = sum(self._state.get(item.name, 0) for item in items)
        passing = [self._passing_bytes(item) for item in items]
        return Unit(
            tuple(items),
            sum(nbytes[key] for key in distinct) + state,
            sum(nbytes[key] for key in distinct if key in self._staying) + state,
            sum(moved for moved, _, _ in passing),
            tuple(sorted((slot for _, slot, _ in passing if slot), reverse=True)[:2]),
            max(part for _, _, part in passing),
            state,
        )

    def _passing_bytes(self, item: Item) -> tuple[int, int, int]:
        """What travels of the item, the room that it needs whole, and the room that its largest part needs."""
        nbytes, resting = self._inventory.nbytes, self._resting
        sizes = tuple([0 if key in resting else nbytes[key] for key in item.tensors] if resting else [nbytes[key] for key in item.tensors])
        known = (type(item.module), item.layout, sizes)
        passing = self._passing.get(known)
        if passing is None:
            slot = sum(map(self._aligned, sizes))
            passing = self._passing[known] = (sum(sizes), slot, slot if item.module is None else self._part_bytes(item.name, item.module))
        return passing

    def _part_bytes(self, name: str, block: nn.Module) -> int:
        def room(_: str, tensor: torch.Tensor) -> int:
            return 0 if id(tensor) in self._resting else self._aligned(self._inventory.nbytes[id(tensor)])

        return smallest_ring({name: block}, room, slots=1).nbytes

    def _aligned(self, nbytes: int) -> int:
        return -(-nbytes // self._travel.alignment) * self._travel.alignment
