"""4-bit integers as AWQ's tools pack them ("gemm"), as the floats that they stand for.

Matrices lie the other way than in the model. `qweight` (int32, inputs × outputs / 8) holds eight neighbouring outputs an element, of which the
even ones come first; so does `qzeros` (int32, groups × outputs / 8). `scales` (groups × outputs) and zeros belong to equal groups of inputs. A
weight is (integer - zero) × scale.

Source: https://github.com/casper-hansen/AutoAWQ, modules/linear/gemm.py and utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from .bit_fields import NIBBLES, split_words
from .entry import Box, Dequantized, Entry, Turned

__all__ = ["join_awq"]

ENDING: Final = "qweight"
PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight integers of an element is each output's."""
SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)


def join_awq(name: str, entries: Mapping[str, Entry]) -> tuple[Entry, list[str]] | None:
    """The float32 entry that a packed one makes with its companions, and the names of all; None where they are not of this kind."""
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
    made = _Awq(f"{name} as AWQ's 4-bit integers", packed, scales, zeros)
    lying = Entry(name, packed.file, 0, packed.nbytes, torch.float32, (inputs, outputs), contents=made)
    whole = Entry(f"{prefix}weight", packed.file, 0, packed.nbytes, torch.float32, (outputs, inputs), contents=Turned(lying))
    return whole, [part.name for part in parts]


@dataclass(frozen=True, slots=True)
class _Awq(Dequantized):
    """The matrix as it lies in the file: (inputs, outputs)."""

    packed: Entry
    scales: Entry
    zeros: Entry

    def boxes(self, at_once_bytes: int) -> Iterator[Box]:
        """Inputs of whole groups, or of one."""
        inputs, outputs = self.packed.shape[0], self.packed.shape[1] * NIBBLES
        group = inputs // self.scales.shape[0]
        at_once = max(1, at_once_bytes // max(1, outputs * 4))
        # Parts of a group have the same scales, so one that does not fit is cut; but no part reaches into the next one.
        step = at_once // group * group or next(size for size in range(min(at_once, group), 0, -1) if group % size == 0)
        for first in range(0, inputs, step):
            yield (first, 0), (min(step, inputs - first), outputs)

    def inputs(self, box: Box) -> tuple[tuple[Entry, Box], ...]:
        """Packed inputs, and the scales and zeros of their groups."""
        (first, _), (count, outputs) = box
        group = self.packed.shape[0] // self.scales.shape[0]
        groups = (first // group, 0), ((first + count - 1) // group + 1 - first // group, outputs)
        words = groups[0], (groups[1][0], outputs // NIBBLES)
        return (self.packed, ((first, 0), (count, outputs // NIBBLES))), (self.scales, groups), (self.zeros, words)

    def values(self, box: Box, inputs: list[torch.Tensor]) -> torch.Tensor:
        """(integer - zero) × scale."""
        packed, scales, zeros = inputs
        values = _in_order(packed).to(torch.float32)
        grouped = values.view(len(scales), -1, values.shape[1])
        grouped.sub_(_in_order(zeros)[:, None]).mul_(scales[:, None])
        return values


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """uint8 (rows, outputs) of int32 (rows, outputs / 8)."""
    return split_words(packed, 4).view(len(packed), -1, NIBBLES)[:, :, PLACES].flatten(1)
