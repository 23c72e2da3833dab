"""From JSON to frozen dataclasses, believing nothing: every field there, of its type, and no other."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from ..json_reading import JsonError

__all__ = ["StrictJsonError", "decode"]


class StrictJsonError(JsonError):
    """What is wrong with the text, and where."""


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """`value`, as `json.loads` gives it, as the annotated type `kind`: dataclasses, tuples, dicts by name, unions, and plain values.

    Raises `StrictJsonError`, naming the place, for a field that is missing, unknown, or of another type.
    """
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal and isinstance(value, str) and value in parts:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(decode(parts[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: decode(parts[1], each, f"{where}[{name!r}]") for name, each in value.items()}
    if origin in (types.UnionType, typing.Union):
        for part in parts:
            if part is type(None) and value is None:
                return None
            if dataclasses.is_dataclass(part) or typing.get_origin(part) is not None:
                if value is not None:
                    return decode(part, value, where)
            elif _is_plain(part, value):
                return value
    elif _is_plain(kind, value):
        return value
    raise StrictJsonError(f"{where or 'it'} is {str(value)[:60]!r}, which is no {_name_of(kind)}")


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return kind in (int, str, bool) and type(value) is kind


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise StrictJsonError(f"{where or 'it'} is {str(value)[:60]!r}, not an object")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    inside = f" in {where}" if where else ""
    if unknown := [name for name in value if name not in fields]:
        raise StrictJsonError(f"{unknown[0]!r}{inside} is unknown")
    if missing := [name for name in fields if name not in value]:
        raise StrictJsonError(f"{missing[0]!r}{inside} is missing")
    kinds = typing.get_type_hints(kind)
    return kind(**{name: decode(kinds[name], each, f"{where}.{name}" if where else name) for name, each in value.items()})


def _name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
