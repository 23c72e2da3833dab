"""JSON from strangers: one object, no key twice, no numbers that JSON does not have, no bombs."""

from __future__ import annotations

from typing import Any, Final

from ..errors import CheckpointError
from ..json_reading import parse_json
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

    try:
        table = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: {what} is not valid JSON ({str(error)[:200]}).") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: {what} is not a JSON object.")
    return table


def _lines(text: bytes, objects: int) -> int:
    """Commas that descriptions of tensors, or lines of an index, may have."""
    return max(COMMAS * objects, len(text) // TENSOR_BYTES)
