"""Packed weights as they stand in checkpoints that others or bigmodel have saved: which tensors belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from ..protocols import TensorSpec
from .description import DESCRIPTION, STATE_NAMES
from .int8 import Int8
from .packed_format import PackedFormat

__all__ = ["StoredWeight", "stored_weights"]

SCALES: Final = "SCB"
FORMAT_NOTE: Final = "weight_format"
"""Beside an 8-bit weight: a number for the order of its elements, of which only one is left."""


@dataclass(slots=True)
class StoredWeight:
    """The names of the tensors of one packed weight."""

    weight: str
    """Name of the packed bytes: that of a layer's weight, or of a stack of expert matrices."""
    companions: dict[str, str] = field(default_factory=dict)
    """Attribute of a packed weight → name in the checkpoint."""
    packing: PackedFormat | None = None
    """None where the description tells."""
    description: str | None = None
    """4-bit: the name of the tensor that describes the weight."""
    others: list[str] = field(default_factory=list)
    """Names of what says nothing that is not known."""

    def beside(self) -> Iterable[str]:
        """All names but that of the packed bytes."""
        yield from self.companions.values()
        yield from self.others
        if self.description is not None:
            yield self.description


def stored_weights(tensors: Mapping[str, TensorSpec]) -> list[StoredWeight]:
    """The weights that bitsandbytes packed among the tensors of a checkpoint; empty for a checkpoint that it did not."""
    found: list[StoredWeight] = []
    for name in tensors:
        beside, _, last = name.rpartition(".")
        if last == SCALES:
            layer = f"{beside}." if beside else ""
            weight = f"{layer}weight"
            if weight not in tensors and len(tensors[name].shape) == 2:  # one for each row of each matrix
                weight = beside
            if weight in tensors and tensors[weight].dtype == torch.int8:
                note = f"{layer}{FORMAT_NOTE}"
                found.append(StoredWeight(weight, {SCALES: name}, Int8(), others=[note] if note in tensors else []))
        elif DESCRIPTION in name and (at := name.find(DESCRIPTION)) > 0:
            weight = name[: at - 1]
            if weight in tensors:
                companions = {key: f"{weight}.{key}" for key in STATE_NAMES if f"{weight}.{key}" in tensors}
                found.append(StoredWeight(weight, companions, description=name))
    return found
