"""What a load did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..devices import DeviceKey
from .store import CheckpointStore

__all__ = ["LoadReport"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was read, where it went, and what did not take part."""

    bytes_read: int
    """Bytes of the files that became elements of resident tensors."""
    seconds: float
    device_bytes: Mapping[DeviceKey, int]
    """Bytes of the model's tensors by device; `"disk"` for those that stay in the checkpoint."""
    missing: tuple[str, ...]
    """Tensors of the model that were left as they are because the caller allowed it."""
    kept: tuple[str, ...]
    """Persistent buffers that the checkpoint lacks and that keep their values."""
    unexpected: tuple[str, ...]
    """Entries that fill nothing."""
    store: CheckpointStore | None
    """Reads the tensors that stay on disk; None where none does."""

    @property
    def bytes_per_second(self) -> float:
        """Rate of the whole load."""
        return self.bytes_read / self.seconds if self.seconds else 0.0
