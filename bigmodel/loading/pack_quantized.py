"""4-bit integers as compressed-tensors packs them ("pack-quantized"), as the floats that they stand for.

`w_packed` (int32, rows × columns / 8) holds eight values an element, the lowest bits first, each plus 8; `w_scale` (rows × groups) belongs
to equal groups of columns, or to those that `w_g_idx` (columns) says; `w_zero_point` (int32, rows / 8 × groups, packed along the rows; in
older files int8, rows × groups) is taken off before. `w_shape` repeats the shape.

Source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError
from .beside import quantization_beside
from .bit_fields import NIBBLES, dequantized, refuse_other_groups, split_words
from .contradiction import PackedKind, refuse_contradictions
from .entry import Box, Dequantized, Entry

__all__ = ["join_pack_quantized", "promised"]

ENDING: Final = "_packed"
OFFSET: Final = 8
"""What is added to the integers (-8 to 7) so that none is negative."""
REORDERED: Final = (True, "group", "dynamic")
"""What configurations call an order in which neighbouring columns may be of different groups."""
SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)


def join_pack_quantized(name: str, entries: Mapping[str, Entry]) -> tuple[Entry, list[str]] | None:
    """The float32 entry that a packed one makes with its companions, and the names of all; None where they are not of this kind.

    The shape is told by the tensors' own, for 4 bits. Whether it is right is seen when `w_shape` is read. Raises `CheckpointError`
    where the configuration beside them is of something else.
    """
    weight = name.removesuffix(ENDING)
    packed, scale, shape = (entries.get(weight + ending) for ending in (ENDING, "_scale", "_shape"))
    zeros, groups = entries.get(f"{weight}_zero_point"), entries.get(f"{weight}_g_idx")
    if not name.endswith(ENDING) or packed is None or scale is None or shape is None or f"{weight}_global_scale" in entries:
        return None
    parts = [part for part in (packed, scale, shape, zeros, groups) if part is not None]
    if not all(part.is_plain for part in parts) or packed.dtype != torch.int32 or len(packed.shape) != 2 or shape.shape != (2,):
        return None
    rows, columns = packed.shape[0], packed.shape[1] * NIBBLES
    if scale.dtype not in SCALES or len(scale.shape) != 2 or scale.shape[0] != rows or not scale.shape[1] or columns % scale.shape[1]:
        return None
    if zeros is not None and (zeros.dtype, zeros.shape) not in (
        (torch.int32, (-(-rows // NIBBLES), scale.shape[1])),
        (torch.int8, scale.shape),
    ):
        return None
    if groups is not None and (groups.shape != (columns,) or groups.dtype != torch.int32):
        return None
    if any(weight + ending not in entries for ending in promised(packed)):
        return None
    refuse_contradictions(PackedKind("compressed-tensors", packed, scale, 4, columns, scale.shape[1]))
    made = _PackQuantized(f"{name} as 4-bit integers", packed, scale, shape, zeros, groups)
    whole = Entry(weight, packed.file, 0, packed.nbytes, torch.float32, (rows, columns), contents=made)
    return whole, [part.name for part in parts]


def promised(packed: Entry) -> tuple[str, ...]:
    """Endings of the companions without which, says the configuration beside the file, no weight in it has its meaning."""
    groups = quantization_beside(packed.file).get("config_groups")
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    described = [each for each in weights if isinstance(each, dict)]
    if not described:
        return ()
    zeros = ("_zero_point",) if all(each.get("symmetric") is False for each in described) else ()
    return (*zeros, "_g_idx") if all(each.get("actorder") in REORDERED for each in described) else zeros


@dataclass(frozen=True, slots=True)
class _PackQuantized(Dequantized):
    packed: Entry
    scale: Entry
    shape: Entry
    zeros: Entry | None
    groups: Entry | None

    def boxes(self, at_once_bytes: int) -> Iterator[Box]:
        """Rows, as many as share the bytes of zero points."""
        rows, columns = self.packed.shape[0], self.packed.shape[1] * NIBBLES
        together = max(1, at_once_bytes // max(1, columns * 4 * NIBBLES)) * NIBBLES
        for first in range(0, rows, together):
            yield (first, 0), (min(together, rows - first), columns)

    def inputs(self, box: Box) -> tuple[tuple[Entry, Box], ...]:
        """Packed rows, their scales, the shape, and zero points and groups where there are any."""
        (first, _), (count, _) = box
        found: list[tuple[Entry, Box]] = [(entry, ((first, 0), (count, entry.shape[1]))) for entry in (self.packed, self.scale)]
        found.append((self.shape, self.shape.whole))
        if self.zeros is not None:
            step = NIBBLES if self.zeros.dtype == torch.int32 else 1
            found.append((self.zeros, ((first // step, 0), (-(-count // step), self.zeros.shape[1]))))
        if self.groups is not None:
            found.append((self.groups, self.groups.whole))
        return tuple(found)

    def values(self, box: Box, inputs: list[torch.Tensor]) -> torch.Tensor:
        """(integer - zero point) × scale. Raises `CheckpointError` where the shape is not that of 4-bit integers."""
        packed, scale, shape, *others = inputs
        expected = [self.packed.shape[0], self.packed.shape[1] * NIBBLES]
        if shape.tolist() != expected:
            raise CheckpointError(
                f"{self.shape.file}: {self.shape.name!r} is {shape.tolist()}; with {self.packed.name} of shape {list(self.packed.shape)} "
                f"4-bit integers would be {expected}, and others are not read. Load the unquantized checkpoint."
            )
        zeros = torch.full_like(scale, OFFSET)
        if self.zeros is not None:
            read = others.pop(0)
            zeros = split_words(read.T, 4).T[: len(packed)] if read.dtype == torch.int32 else read + OFFSET
        # Where columns were not reordered, all groups are -1.
        group_of = others[0].long() if others and not (others[0] == -1).all() else None
        if group_of is not None and self.groups is not None:
            refuse_other_groups(self.groups, group_of, scale.shape[1])
        return dequantized(split_words(packed, 4), zeros, scale, self.scale, group_of)
