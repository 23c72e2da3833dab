"""Nested structures: what lists, tuples, deques, mappings and dataclasses hold, and the same container around other values."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

__all__ = ["children", "is_dataclass_instance", "is_namedtuple", "keys", "rebuilt"]


def is_namedtuple(data: object) -> bool:
    """Whether `data` is a namedtuple, or an instance of a class made from one."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: object) -> bool:
    """Whether `data` is an instance of a dataclass (and not the class)."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def children(data: Any) -> Collection[Any] | None:
    """What a container holds, in order; None for anything that is not opened."""
    if isinstance(data, (tuple, list, deque)):
        return data
    if isinstance(data, Mapping):
        return data.values()
    if is_dataclass_instance(data):
        return [getattr(data, field.name, None) for field in dataclasses.fields(data)]
    return None


def keys(data: Any) -> Collection[str]:
    """How each of a container's children is reached: `[0]`, `['key']`, `.field`."""
    if isinstance(data, Mapping):
        return [f"[{key!r}]" for key in data]
    if is_dataclass_instance(data):
        return [f".{field.name}" for field in dataclasses.fields(data)]
    if is_namedtuple(data):
        return [f".{name}" for name in data._fields]
    return [f"[{index}]" for index in range(len(data))]


def rebuilt(data: Any, values: Collection[Any]) -> Any:
    """A container like `data`, of its own type, around `values` (one for each of its children).

    What else an instance holds (the factory of a defaultdict, attributes of a `UserDict`) comes along. A dataclass none of whose fields
    change is the same object.
    """
    if is_namedtuple(data):
        return type(data)(*values)
    if isinstance(data, (tuple, list)):
        return type(data)(values)
    if isinstance(data, deque):
        line = copy.copy(data)
        line.clear()
        line.extend(values)
        return line
    if type(data) is dict:
        return dict(zip(data, values, strict=True))
    if isinstance(data, MutableMapping):
        result = copy.copy(data)
        for key, value in zip(data, values, strict=True):
            result[key] = value
        return result
    if isinstance(data, Mapping):
        return type(data)(dict(zip(data, values, strict=True)))  # type: ignore[call-arg]
    names = [field.name for field in dataclasses.fields(data)]
    changed = {name: value for name, value in zip(names, values, strict=True) if value is not getattr(data, name, None)}
    if not changed:
        return data
    result = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(result, name, value)  # frozen ones, too
    return result
