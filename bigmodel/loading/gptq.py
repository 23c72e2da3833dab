"""Integers of 2, 4 or 8 bits as GPTQ's tools pack them, as the floats that they stand for.

Matrices lie the other way than in the model. `qweight` (int32, inputs × bits / 32, outputs) is packed along the inputs, the lowest bits
first; `scales` (groups, outputs) and `qzeros` (int32, groups, outputs × bits / 32) belong to groups of inputs, `g_idx` (inputs) says which
of them is whose: neighbours, or any that were alike (`desc_act`). A weight is (integer - zero) × scale.

In what tools call the format "gptq", zeros are stored less 1, and wrap around; in "gptq_v2" as they are. Files do not say which it is: the
configuration beside them does, and without one only symmetric quantization, whose zeros are all the same, is beyond doubt.

Source: https://github.com/AutoGPTQ/AutoGPTQ, nn_modules/qlinear; https://github.com/ModelCloud/GPTQModel, `checkpoint_format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..errors import CheckpointError
from .beside import CONFIGS, descriptions_beside, quantization_beside
from .bit_fields import columns_at_once, dequantized, refuse_other_groups, split_words
from .contradiction import OTHERS, PackedKind, refuse_contradictions
from .entry import Box, Dequantized, Entry
from .location import CheckpointFile

__all__ = ["join_gptq"]

ENDING: Final = "qweight"
STORED_LESS: Final = {"gptq": 1, "gptq_v2": 0}
"""What is taken off zeros before they are stored, by the name of the format."""
SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)
AT_ONCE: Final = 2
"""Boxes are larger than others', since all scales are read for each."""


def join_gptq(name: str, entries: Mapping[str, Entry]) -> tuple[Entry, list[str]] | None:
    """The float32 entry that a packed one makes with its companions, and the names of all; None where they are not of this kind.

    Raises `CheckpointError` where the configuration beside them is of something else.
    """
    prefix = name.removesuffix(ENDING)
    if not name.endswith(ENDING) or (prefix and not prefix.endswith(".")):
        return None
    found = [entries.get(prefix + each) for each in (ENDING, "scales", "qzeros", "g_idx")]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or not all(part.is_plain for part in parts):
        return None
    packed, scales, zeros, groups = parts
    if [len(part.shape) for part in parts] != [2, 2, 2, 1] or {packed.dtype, zeros.dtype, groups.dtype} != {torch.int32}:
        return None
    (words, outputs), (inputs,) = packed.shape, groups.shape
    bits = words * 32 // inputs if inputs else 0
    fits = scales.shape[1:] == (outputs,) and zeros.shape == (scales.shape[0], outputs * bits // 32)
    if bits not in (2, 4, 8) or words * 32 != inputs * bits or outputs * bits % 32 or not fits or scales.dtype not in SCALES:
        return None
    known = _checkpoint_format(packed.file)
    if known is not None and known not in STORED_LESS:
        return None
    refuse_contradictions(PackedKind("gptq", packed, scales, bits, inputs, scales.shape[0]))
    less = None if known is None else STORED_LESS[known]
    made = _Gptq(f"{name} as {bits}-bit integers", packed, scales, zeros, groups, bits, less, _symmetric(packed.file))
    whole = Entry(f"{prefix}weight", packed.file, 0, packed.nbytes, torch.float32, (outputs, inputs), contents=made)
    return whole, [part.name for part in parts]


def _checkpoint_format(file: CheckpointFile) -> str | None:
    """What the configuration beside a file calls the format; None where there is none that speaks of quantization."""
    described = quantization_beside(file)
    return str(described.get("checkpoint_format") or "gptq") if described else None


def _symmetric(file: CheckpointFile) -> Path | None:
    """The configuration that says that all zeros are the middle of the integers; None where none does."""
    return next((config for config, content in descriptions_beside(file).items() if content.get("sym") is True), None)


@dataclass(frozen=True, slots=True)
class _Gptq(Dequantized):
    packed: Entry
    scales: Entry
    zeros: Entry
    groups: Entry
    bits: int
    stored_less: int | None
    """What was taken off the zeros; None where that is not known."""
    symmetric: Path | None
    """The configuration that promises zeros in the middle; None where none does."""

    def boxes(self, at_once_bytes: int) -> Iterator[Box]:
        """Inputs of all outputs: as many as share words, and groups where these are neighbours."""
        (inputs,), (_, outputs) = self.groups.shape, self.packed.shape
        together = columns_at_once(AT_ONCE * at_once_bytes, outputs, inputs // self.scales.shape[0], 32 // self.bits)
        for first in range(0, inputs, together):
            yield (0, first), (outputs, min(together, inputs - first))

    def inputs(self, box: Box) -> tuple[tuple[Entry, Box], ...]:
        """Packed inputs and their groups, and all scales and zeros."""
        (_, first), (outputs, count) = box
        step = 32 // self.bits
        words = (self.packed, ((first // step, 0), (count // step, outputs)))
        return words, (self.groups, ((first,), (count,))), (self.scales, self.scales.whole), (self.zeros, self.zeros.whole)

    def values(self, box: Box, inputs: list[torch.Tensor]) -> torch.Tensor:
        """(integer - zero) × scale. Raises `CheckpointError` for groups that there are not, and for zeros that may mean two things or are
        not what the configuration promises.
        """
        packed, groups, scales, read = inputs
        refuse_other_groups(self.groups, groups, len(scales))
        # Turned while they are small.
        integers = split_words(packed.T.contiguous(), self.bits)
        return dequantized(integers, self._zeros(split_words(read, self.bits)).T, scales.T, self.scales, groups.long())

    def _zeros(self, stored: torch.Tensor) -> torch.Tensor:
        middle = 1 << (self.bits - 1)
        if self.stored_less is not None:
            zeros = stored + self.stored_less & (1 << self.bits) - 1
            if self.symmetric is not None and not (zeros == middle).all():
                raise CheckpointError(
                    f"{self.symmetric}: says that the quantization is symmetric (sym), so that all zeros are {middle}, but those of "
                    f"{self.zeros.name!r} in {self.zeros.file.name} go from {int(zeros.min())} to {int(zeros.max())}. {OTHERS}"
                )
            return zeros
        if (stored == middle).all() or (stored == middle - 1).all():
            return torch.full_like(stored, middle)
        raise CheckpointError(
            f"{self.zeros.file}: {self.zeros.name!r} may be stored as they are or less 1 (checkpoint_format 'gptq_v2' or 'gptq'), and no "
            f"configuration beside the file says which. Put the model's {' or '.join(CONFIGS)} there."
        )
