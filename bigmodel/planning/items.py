"""What a plan places: the blocks of a model and the leaf modules and tensors around them, with exact bytes, tied ones joined."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..constants import GROUP_ALIGNMENT_BYTES
from ..errors import PlanError
from ..modules import find_blocks, row_tables
from .sizes import TensorBytes

__all__ = ["Inventory", "Item", "Unit", "buffer_bytes", "find_items", "join_tied"]


@dataclass(frozen=True, slots=True)
class Item:
    """A module that is placed whole, or the tensors that an inner module holds itself: its forward needs them on one device."""

    name: str
    tensors: tuple[int, ...]
    """Identities of its distinct tensors, in order."""
    is_block: bool
    entries: tuple[str, ...]
    """The names that stand for it in a device map: its own, or those of the tensors."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Items that share tensors, and so live on one device; most units are one item."""

    items: tuple[Item, ...]
    total_bytes: int
    """Everything that it takes on the device where it runs: tensors, shared ones once, and the state of the run."""
    staying_bytes: int
    """Bytes that stay on the main device when the unit is offloaded: buffers that do not travel, and the state of the run."""
    moved_bytes: int
    """Bytes that travel in every step when the unit is offloaded; a tensor that several items use travels for each of them."""
    slot_bytes: tuple[int, ...]
    """Room that the items need to pass through, the largest two, the larger first; empty when nothing passes through."""
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
            tensors = list(_tensors_below(module, name))
            if tensors:
                _add(inventory, name, tensors, rule, is_block=is_block)
            continue
        own = list(_own_tensors(module, name))
        if own:
            _add(inventory, own[0][0], own, rule, is_block=False, entries=tuple(tensor_name for tensor_name, _, _ in own))
        stack += reversed([(_join(name, key), child) for key, child in module._modules.items() if child is not None])
    if not inventory.items:
        raise PlanError(f"{type(model).__name__} has no parameters and no buffers: there is nothing to place.")
    return inventory


def buffer_bytes(unit: Unit, inventory: Inventory) -> int:
    """Bytes of the unit's buffers, shared ones once."""
    if not inventory.buffers:
        return 0
    return sum(inventory.nbytes[key] for key in {key for item in unit.items for key in item.tensors if key in inventory.buffers})


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _own_tensors(module: nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor, bool | None]]:
    """Name, tensor, and for buffers whether they are part of the state dict (None for parameters)."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield _join(name, key), parameter, None
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield _join(name, key), buffer, key not in module._non_persistent_buffers_set


def _tensors_below(module: nn.Module, name: str) -> Iterator[tuple[str, torch.Tensor, bool | None]]:
    stack = [(name, module)]
    while stack:
        path, current = stack.pop()
        yield from _own_tensors(current, path)
        stack += [(_join(path, key), child) for key, child in current._modules.items() if child is not None]


def _add(
    inventory: Inventory,
    name: str,
    tensors: list[tuple[str, torch.Tensor, bool | None]],
    rule: TensorBytes,
    *,
    is_block: bool,
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
    inventory.items.append(Item(name, tuple(keys), is_block, entries or (name,)))


def join_tied(
    inventory: Inventory,
    *,
    offload_buffers: bool,
    alignment: int = GROUP_ALIGNMENT_BYTES,
    whole_embeddings: bool = False,
    state_bytes: Mapping[str, int] | None = None,
) -> list[Unit]:
    """The items as units, in the order of the model; items that share a tensor, directly or through others, form one.

    With `offload_buffers` the buffers of the state dict travel with their item; computed ones never do. While a group passes through, each
    of its tensors starts at a multiple of `alignment` bytes. With `whole_embeddings` an embedding table travels like any other weight.
    `state_bytes` is what the run keeps beside modules, by name of the module or of one inside it.
    """
    state = _state_by_item(inventory, state_bytes or {})
    if sum(len(item.tensors) for item in inventory.items) == len(inventory.nbytes):  # nothing is shared
        return [_unit((item,), inventory, offload_buffers, alignment, whole_embeddings, state) for item in inventory.items]
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
    return [_unit(tuple(items), inventory, offload_buffers, alignment, whole_embeddings, state) for items in members.values()]


def _state_by_item(inventory: Inventory, state_bytes: Mapping[str, int]) -> dict[str, int]:
    """State by the item that the module is, or is part of. Raises `PlanError` for a module that no item holds."""
    if not state_bytes:
        return {}
    names = {item.name for item in inventory.items}
    state: dict[str, int] = {}
    for module, nbytes in state_bytes.items():
        name = module
        while name not in names:
            if not name:
                raise PlanError(f"State of the run is given for module {module!r}, which holds no weights and is part of no block.")
            name = name.rpartition(".")[0]
        state[name] = state.get(name, 0) + nbytes
    return state


def _unit(
    items: tuple[Item, ...],
    inventory: Inventory,
    offload_buffers: bool,
    alignment: int,
    whole_embeddings: bool,
    state: Mapping[str, int],
) -> Unit:
    nbytes, buffers = inventory.nbytes, inventory.buffers

    def stays(key: int) -> bool:
        return key in buffers and not (offload_buffers and buffers[key])

    distinct = items[0].tensors if len(items) == 1 else tuple(dict.fromkeys(key for item in items for key in item.tensors))
    total_bytes = sum(nbytes[key] for key in distinct)
    staying_bytes = sum(nbytes[key] for key in distinct if stays(key))
    at_rest = set() if whole_embeddings else inventory.row_tables
    travelling = [[nbytes[key] for key in item.tensors if not stays(key) and key not in at_rest] for item in items]
    slots = sorted((sum(-(-size // alignment) * alignment for size in sizes) for sizes in travelling if sum(sizes)), reverse=True)
    state_bytes = sum(state.get(item.name, 0) for item in items)
    return Unit(items, total_bytes + state_bytes, staying_bytes + state_bytes, sum(map(sum, travelling)), tuple(slots[:2]), state_bytes)
