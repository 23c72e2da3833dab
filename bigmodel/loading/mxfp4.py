"""Stacked experts in MXFP4, as gpt-oss ships them, as the floats that they stand for.

Format: OCP Microscaling Formats (MX) v1.0. `w_blocks` (uint8, experts × rows × blocks × 16 bytes) holds two 4-bit floats (E2M1) a byte, the
lower half first; `w_scales` (uint8, experts × rows × blocks) the exponent of two, plus 127 (E8M0), that all 32 values of a block share. In
the model the matrices stand the other way: `w` is experts × columns × rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from .entry import Entry, Packed, Scaled, Turned

__all__ = ["BLOCKS_ENDING", "join_mxfp4"]

BLOCKS_ENDING: Final = "_blocks"
SCALES_ENDING: Final = "_scales"
BYTES: Final = 16
"""Of a block."""
VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen patterns of four bits stand for (E2M1)."""


def join_mxfp4(name: str, entries: Mapping[str, Entry]) -> tuple[Entry, list[str]] | None:
    """The float32 entry that blocks make with their scales, and the names of both; None where they are not such a pair."""
    whole = name.removesuffix(BLOCKS_ENDING)
    blocks, scales = entries.get(whole + BLOCKS_ENDING), entries.get(whole + SCALES_ENDING)
    if not name.endswith(BLOCKS_ENDING) or blocks is None or scales is None:
        return None
    exponents: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
    plain = all(each.dtype == torch.uint8 and each.is_plain for each in (blocks, scales))
    if not plain or exponents is None or len(scales.shape) != 3 or blocks.shape != (*scales.shape, BYTES):
        return None
    experts, rows, count = scales.shape
    columns = 2 * BYTES * count
    shape = (experts, rows, columns)
    packed = Packed("MXFP4", BYTES * count, _unpack)
    values = Entry(blocks.name, blocks.file, blocks.offset, blocks.nbytes, torch.float32, shape, contents=packed)
    powers = Entry(scales.name, scales.file, scales.offset, scales.nbytes, exponents, scales.shape)
    scaled = Entry(blocks.name, blocks.file, 0, blocks.nbytes, torch.float32, shape, contents=Scaled(values, powers, (1, 1, 2 * BYTES)))
    made = Entry(whole, blocks.file, 0, blocks.nbytes, torch.float32, (experts, columns, rows), contents=Turned(scaled))
    return made, [blocks.name, scales.name]


def _unpack(rows: torch.Tensor) -> torch.Tensor:
    """float32 rows (n, 2 × bytes) of packed ones (n, bytes), before they are scaled."""
    values = torch.tensor(VALUES)
    both = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)  # by byte: lower half, upper half
    return both.index_select(0, rows.flatten().int()).view(rows.shape[0], -1)
