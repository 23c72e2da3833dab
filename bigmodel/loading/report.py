"""What a load did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..devices import DeviceKey
from ..protocols import TensorSpec
from .store import CheckpointStore

__all__ = ["KeptWeight", "LoadReport"]


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """What is kept of a weight that was packed."""

    spec: TensorSpec
    """Shape and dtype that it was packed from."""
    tensors: Mapping[str, torch.Tensor]
    """By full name; on meta where they stay on disk."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read, where it went, and what did not take part."""

    bytes_read: int
    """Bytes of the files that became elements of resident tensors."""
    mapped_bytes: int
    """Bytes of tensors that lie on the pages of their file; 0 unless that was asked for."""
    seconds: float
    device_bytes: Mapping[DeviceKey, int]
    """Bytes of the model's tensors by device; `"disk"` for those that stay in the checkpoint."""
    missing: tuple[str, ...]
    """Tensors of the model that were left as they are because the caller allowed it."""
    kept: tuple[str, ...]
    """Persistent buffers and extra states that the checkpoint lacks and that keep their values."""
    unexpected: tuple[str, ...]
    """Entries that fill nothing."""
    store: CheckpointStore | None
    """Reads the tensors that stay on disk; None where none does."""
    packed: Mapping[str, KeptWeight] = field(default_factory=dict)
    """What a packer kept, by full name of the weight. The model has none of it yet."""

    @property
    def bytes_per_second(self) -> float:
        """Rate of the whole load."""
        return self.bytes_read / self.seconds if self.seconds else 0.0
