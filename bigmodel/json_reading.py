"""JSON that a stranger may have written: no name twice in an object, no numbers that JSON does not have, no depth without end."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .text import first_repeated

__all__ = ["JsonError", "parse_json"]


class JsonError(ValueError):
    """What is wrong with the text."""


def parse_json(text: str | bytes) -> Any:
    """What the text says. Raises `JsonError` for text that is no JSON, for names that come twice, NaN and infinity."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    # RecursionError: thousands of nested brackets. ValueError: no Unicode, no JSON, or a number of thousands of digits. TypeError: no text.
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, JsonError):
            raise
        raise JsonError(f"it is no JSON ({type(error).__name__}: {str(error)[:200]})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise JsonError(f"it holds {first_repeated(name for name, _ in pairs)[:200]!r} twice")
    return table


def _no_number(name: str) -> NoReturn:
    raise JsonError(f"{name} is no number")
