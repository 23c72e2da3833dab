"""The small protocols through which rooms of one floor, or a lower and a higher one, hand weights to each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

__all__ = ["Read", "Store", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor to be brought: `name` in the store, and the memory that it fills."""

    name: str
    destination: torch.Tensor
    """Contiguous, on CPU, of the store's shape; any floating dtype where the store's is floating (cast on the way)."""


@runtime_checkable
class Store(Protocol):
    """Where offloaded bytes rest. Safe to be used by several threads at once.

    A store never hands out its own memory to be written to: `read_into` fills the caller's. `write` changes what later reads give; a
    store whose bytes are somebody's checkpoint keeps the new value beside it and leaves the file alone.
    """

    @property
    def kind(self) -> str:
        """`"cpu"` or `"disk"`, as in a device map."""
        ...

    def names(self) -> Collection[str]:
        """The full names of the tensors kept here."""
        ...

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype that `name` is read with by default. Raises KeyError."""
        ...

    def read_into(self, reads: Sequence[Read]) -> None:
        """Fills every destination; adjacent ranges are merged. Raises `CheckpointError` when the file has changed."""
        ...

    def read_rows(self, name: str, rows: torch.Tensor, destination: torch.Tensor) -> None:
        """Fills `destination` (n, …) with the rows `rows` (n, int64, on CPU) of the first dimension of `name`."""
        ...

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replaces the value of `name` (same shape; any floating dtype)."""
        ...
