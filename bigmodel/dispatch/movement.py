"""Moving arguments and outputs between devices: only what must move, in containers that keep their identity where nothing moves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from ..structures import children, is_dataclass_instance, rebuilt

__all__ = ["Moves", "find_device", "is_tensor_on", "move", "send_to_device"]


def find_device(data: object) -> torch.device | None:
    """The device of the first tensor in nested lists, tuples, mappings and dataclasses; None without one."""
    if isinstance(data, torch.Tensor):
        return data.device
    for value in children(data) or ():
        device = find_device(value)
        if device is not None:
            return device
    return None


def is_tensor_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `tensor` is on `device`; an index of None means the current device, which both sides resolve alike."""
    have = tensor.device
    return have == device or (have.type == device.type and (device.index is None or (have.index or 0) == device.index))


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Collection[str] | None = None) -> Any:
    """The nested structure with everything that has a `.to` on `device`; other objects come back as they are.

    Lists, tuples, mappings and dataclasses are opened, and rebuilt with their own types. `skip_keys` names mapping keys, at any depth,
    whose values stay.
    """
    kind = type(tensor)
    if kind is torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=non_blocking)
    if not skip_keys:  # most batches: every loop over a loader waits for this
        if kind is dict:
            return {key: send_to_device(value, device, non_blocking) for key, value in tensor.items()}
        if kind is list:
            return [send_to_device(value, device, non_blocking) for value in tensor]
        if kind is tuple:
            return tuple([send_to_device(value, device, non_blocking) for value in tensor])
    if hasattr(tensor, "to"):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # objects of other libraries whose `to` knows only the device
            return tensor.to(device)
    inside = children(tensor)
    if inside is None:
        return tensor
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    names = tensor.keys() if isinstance(tensor, Mapping) else (None,) * len(inside)
    return rebuilt(
        tensor,
        [
            value if name in skipped else send_to_device(value, device, non_blocking, skipped)
            for name, value in zip(names, inside, strict=True)
        ],
    )


class Moves:
    """What was moved for one call.

    The same object, given twice, is moved once (a forward may ask `query is key`). Containers are copied if something in them has to move;
    what the forward writes to a copy reaches the original.
    """

    def __init__(self) -> None:
        self._copies: list[Callable[[], None]] = []
        self.moved: dict[int, tuple[Any, Any]] = {}
        """By id: what was given, and what takes its place."""

    def of_mapping(self, original: MutableMapping[Any, Any], changed: Mapping[Any, Any]) -> MutableMapping[Any, Any]:
        """A shallow copy of `original`, of its type, with the values in `changed`."""
        result = copy.copy(original)
        for key, value in changed.items():
            result[key] = value
        given = dict(result.items())

        def write_back() -> None:
            for key, value in list(result.items()):
                if key not in given or given[key] is not value:
                    original[key] = value
            for key in given:
                if key not in result and key in original:
                    del original[key]

        self._copies.append(write_back)
        return result

    def of_list(self, original: list[Any], items: list[Any]) -> list[Any]:
        """A shallow copy of `original`, of its type, with `items` in it."""
        result = copy.copy(original)
        result[:] = items
        before = {id(item): old for item, old in zip(items, original, strict=True)}

        def write_back() -> None:
            if len(result) != len(items) or any(now is not then for now, then in zip(result, items, strict=True)):
                original[:] = [before.get(id(item), item) for item in result]

        self._copies.append(write_back)
        return result

    def of_dataclass(self, original: Any, changed: Mapping[str, Any]) -> Any:
        """A shallow copy of the dataclass instance with the fields in `changed`."""
        result = copy.copy(original)
        for name, value in changed.items():
            object.__setattr__(result, name, value)
        fields = [field.name for field in dataclasses.fields(original)]
        given = {name: getattr(result, name, None) for name in fields}

        def write_back() -> None:
            for name in fields:
                value = getattr(result, name, None)
                if value is not given[name]:
                    object.__setattr__(original, name, value)

        self._copies.append(write_back)
        return result

    def write_back(self) -> None:
        """Carries additions, replacements and deletions made in the copies to the originals."""
        for write_back in reversed(self._copies):
            write_back()


def move(data: Any, device: torch.device, skip_keys: Collection[str] = (), moves: Moves | None = None) -> Any:
    """`data` with every tensor on `device`; the very same object where nothing has to move.

    Tensors are looked for in lists, tuples, mappings and dataclasses. Objects with a state of their own (caches) are never opened.
    `skip_keys` names mapping keys, at any depth, whose values stay as they are.
    """
    if isinstance(data, torch.Tensor) and is_tensor_on(data, device):
        return data
    if data is None or isinstance(data, (str, int, float, bool, torch.device, torch.dtype)):
        return data
    moves = moves or Moves()
    known = moves.moved.get(id(data))
    if known is not None:
        return known[1]
    result = _moved(data, device, skip_keys, moves)
    if result is not data:
        moves.moved[id(data)] = (data, result)
    return result


def _moved(data: Any, device: torch.device, skip_keys: Collection[str], moves: Moves) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, tuple):
        items = [move(item, device, skip_keys, moves) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        if hasattr(data, "to"):  # a PackedSequence checks what it is built from; it knows how to move itself
            return data.to(device)
        return rebuilt(data, items)
    if isinstance(data, list):
        items = [move(item, device, skip_keys, moves) for item in data]
        return data if all(new is old for new, old in zip(items, data, strict=True)) else moves.of_list(data, items)
    if isinstance(data, Mapping):
        changed = _changed(data.items(), device, skip_keys, moves)
        if not changed:
            return data
        if isinstance(data, MutableMapping):
            return moves.of_mapping(data, changed)
        return type(data)({**data, **changed})  # type: ignore[call-arg]
    if is_dataclass_instance(data):
        fields = ((field.name, getattr(data, field.name, None)) for field in dataclasses.fields(data))
        changed = _changed(fields, device, skip_keys, moves)
        return moves.of_dataclass(data, changed) if changed else data
    return data


def _changed(items: Iterable[tuple[Any, Any]], device: torch.device, skip_keys: Collection[str], moves: Moves) -> dict[Any, Any]:
    """The values that had to be moved, by key."""
    changed = {}
    for key, value in items:
        if key not in skip_keys:
            moved = move(value, device, skip_keys, moves)
            if moved is not value:
                changed[key] = moved
    return changed
