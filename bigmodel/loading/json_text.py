"""JSON from strangers: one object, no key twice, no numbers that JSON does not have, no bombs."""

from __future__ import annotations

import json
from typing import Any, Final

from ..errors import CheckpointError
from ..text import first_repeated
from .location import CheckpointFile

__all__ = ["parse_object"]

FREE: Final = 1 << 20
"""Brackets and commas that need no explanation: metadata is text, in which any number of them may stand."""
TENSOR_BYTES: Final = 40
"""Shortest description of a tensor, and shortest line of an index."""
COMMAS: Final = 16
"""In the description of a tensor of ten dimensions."""


def parse_object(text: bytes, file: CheckpointFile, what: str) -> dict[str, Any]:
    """The object that `text` is; `what` names it in messages (`"its header"`).

    Raises `CheckpointError` for anything else, and before it is parsed for text that would take many times its size in memory, because it
    consists of empty lists or short numbers and describes nothing.
    """
    objects = text.count(b"{")
    if (
        objects > FREE + len(text) // TENSOR_BYTES
        or text.count(b"[") > FREE + 2 * objects
        or text.count(b",") > FREE + _lines(text, objects)
    ):
        raise CheckpointError(f"{file}: {what} of {len(text)} bytes describes no tensors with most of its brackets and commas.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = first_repeated(key for key, _ in pairs)
            raise CheckpointError(f"{file}: {what} holds {twice[:200]!r} twice.")
        return table

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse)
    # RecursionError: thousands of nested brackets. ValueError: no UTF-8, no JSON, or a number of thousands of digits.
    except (RecursionError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: {what} is not valid JSON ({type(error).__name__}: {str(error)[:200]}).") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: {what} is not a JSON object.")
    return table


def _lines(text: bytes, objects: int) -> int:
    """Commas that descriptions of tensors, or lines of an index, may have."""
    return max(COMMAS * objects, len(text) // TENSOR_BYTES)
