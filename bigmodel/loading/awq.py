"""4-bit integers as AWQ's tools pack them ("gemm"), as the floats that they stand for.

Matrices lie the other way than in the model. `qweight` (int32, inputs × outputs / 8) holds eight neighbouring outputs an element, of which
the even ones come first; so does `qzeros` (int32, groups × outputs / 8). `scales` (groups × outputs) and zeros belong to equal groups of
inputs. A weight is (integer - zero) × scale.

Source: https://github.com/casper-hansen/AutoAWQ, modules/linear/gemm.py and utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from .bit_fields import NIBBLES, columns_at_once, dequantized
from .contradiction import PackedKind, refuse_contradictions
from .entry import Box, Dequantized, Entry

__all__ = ["join_awq"]

ENDING: Final = "qweight"
PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight integers of an element is each output's."""
SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)


def join_awq(name: str, entries: Mapping[str, Entry]) -> tuple[Entry, list[str]] | None:
    """The float32 entry that a packed one makes with its companions, and the names of all; None where they are not of this kind.

    Raises `CheckpointError` where the configuration beside them is of something else.
    """
    prefix = name.removesuffix(ENDING)
    if not name.endswith(ENDING) or (prefix and not prefix.endswith(".")) or f"{prefix}g_idx" in entries:
        return None
    found = [entries.get(prefix + each) for each in (ENDING, "scales", "qzeros")]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or not all(part.is_plain and len(part.shape) == 2 for part in parts):
        return None
    packed, scales, zeros = parts
    (inputs, words), groups = packed.shape, scales.shape[0]
    outputs = words * NIBBLES
    fits = scales.shape == (groups, outputs) and zeros.shape == (groups, words)
    if {packed.dtype, zeros.dtype} != {torch.int32} or scales.dtype not in SCALES or not fits or not groups or inputs % groups:
        return None
    refuse_contradictions(PackedKind("awq", packed, scales, 4, inputs, groups))
    made = _Awq(f"{name} as AWQ's 4-bit integers", packed, scales, zeros)
    whole = Entry(f"{prefix}weight", packed.file, 0, packed.nbytes, torch.float32, (outputs, inputs), contents=made)
    return whole, [part.name for part in parts]


@dataclass(frozen=True, slots=True)
class _Awq(Dequantized):
    packed: Entry
    scales: Entry
    zeros: Entry

    def boxes(self, at_once_bytes: int) -> Iterator[Box]:
        """Inputs of all outputs: whole groups, or a part of one."""
        inputs, outputs = self.packed.shape[0], self.packed.shape[1] * NIBBLES
        group = inputs // self.scales.shape[0]
        together = columns_at_once(at_once_bytes, outputs, group, 1)
        for start in range(0, inputs, max(group, together)):
            for first in range(start, min(start + max(group, together), inputs), together):
                yield (0, first), (outputs, min(together, start + max(group, together) - first, inputs - first))

    def inputs(self, box: Box) -> tuple[tuple[Entry, Box], ...]:
        """Packed inputs, and the scales and zeros of their groups."""
        (_, first), (outputs, count) = box
        group, words = self.packed.shape[0] // self.scales.shape[0], outputs // NIBBLES
        start, groups = first // group, (first + count - 1) // group + 1 - first // group
        return (
            (self.packed, ((first, 0), (count, words))),
            (self.scales, ((start, 0), (groups, outputs))),
            (self.zeros, ((start, 0), (groups, words))),
        )

    def values(self, box: Box, inputs: list[torch.Tensor]) -> torch.Tensor:
        """(integer - zero) × scale."""
        packed, scales, zeros = inputs
        return dequantized(_in_order(packed), _in_order(zeros), scales.T, self.scales)


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """int32 (inputs, outputs / 8) → uint8 (outputs, inputs)."""
    inputs, words = packed.shape
    parts = packed.T.flatten().view(torch.uint8).view(words, inputs, 4)
    return torch.stack([parts[..., place // 2] >> 4 * (place % 2) & 15 for place in PLACES], 1).flatten(0, 1)
