"""Parts of a file that are needed together, asked for together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from .header import Opened

__all__ = ["Windows"]

GAP_BYTES: Final = 8 << 10
"""Between two parts that become one: asking takes longer than to receive as much."""


class Windows:
    """A file of which the parts `wanted` (first byte, byte behind the last) are held. Raises what reading it raises."""

    def __init__(self, opened: Opened, wanted: Iterable[tuple[int, int]]) -> None:
        self._opened = opened
        joined: list[tuple[int, int]] = []
        for start, end in sorted(wanted):
            if joined and start - joined[-1][1] <= GAP_BYTES:
                joined[-1] = joined[-1][0], max(joined[-1][1], end)
            else:
                joined.append((start, end))
        self._starts = [start for start, _ in joined]
        self._parts = opened.read_all(joined)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`: from a part that is held, or else from the file."""
        number = bisect_right(self._starts, start) - 1
        if number >= 0:
            first, part = self._starts[number], self._parts[number]
            if end <= first + len(part):
                return part[start - first : end - first]
        return self._opened.read(start, end)
