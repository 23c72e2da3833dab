"""Packed weights as they stand in checkpoints that bitsandbytes, transformers or bigmodel have saved: which tensors belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from ..protocols import TensorSpec
from .description import DESCRIPTION, STATE_NAMES

__all__ = ["StoredWeight", "stored_weights"]

SCALES: Final = "SCB"
FORMAT_NOTE: Final = "weight_format"
"""Beside an 8-bit weight: a number for the order of its elements, of which only one is left."""


@dataclass(slots=True)
class StoredWeight:
    """The names of the tensors of one packed weight."""

    layer: str
    """Name of the layer, as the checkpoint has it."""
    companions: dict[str, str] = field(default_factory=dict)
    """Attribute of a packed layer → name in the checkpoint."""
    description: str | None = None
    """4-bit: the name of the tensor that describes the weight."""
    others: list[str] = field(default_factory=list)
    """Names of what says nothing that is not known."""

    @property
    def weight(self) -> str:
        """Name of the packed bytes."""
        return f"{self.layer}.weight" if self.layer else "weight"

    def beside(self) -> Iterable[str]:
        """All names but that of the packed bytes."""
        yield from self.companions.values()
        yield from self.others
        if self.description is not None:
            yield self.description


def stored_weights(tensors: Mapping[str, TensorSpec]) -> list[StoredWeight]:
    """The packed weights among the tensors of a checkpoint; empty for a checkpoint that is not packed."""
    found: list[StoredWeight] = []
    for name in tensors:
        layer, _, last = name.rpartition(".")
        if last == SCALES:
            stored = StoredWeight(layer, {SCALES: name})
            weight = tensors.get(stored.weight)
            if weight is not None and weight.dtype == torch.int8:
                note = f"{layer}.{FORMAT_NOTE}" if layer else FORMAT_NOTE
                stored.others += [note] if note in tensors else []
                found.append(stored)
        elif DESCRIPTION in name and (at := name.find(DESCRIPTION)) >= 0:
            stored = StoredWeight(name[:at].removesuffix("."), description=name)
            if stored.weight in tensors:
                prefix = f"{stored.layer}." if stored.layer else ""
                stored.companions = {key: prefix + saved for key, saved in STATE_NAMES.items() if prefix + saved in tensors}
                found.append(stored)
    return found
