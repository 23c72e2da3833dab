"""The small protocols through which rooms of one floor, or a lower and a higher one, hand weights to each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import nn

__all__ = ["UNTRAINABLE", "Offloaded", "Packer", "Packing", "Read", "Store", "TensorSpec", "WeightFormat"]

UNTRAINABLE: Final = "untrainable"
"""Attribute of a parameter that cannot be trained: what makes the error that says so. It goes with the parameter wherever that rests."""


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


@runtime_checkable
class PagedStore(Store, Protocol):
    """A store whose bytes lie in files, of which some are tensors as they are: arithmetic on the CPU can run on mapped pages of them."""

    def is_paged(self, name: str) -> bool:
        """Whether `pages` gives the tensor `name`."""
        ...

    def pages(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Tensors on mapped pages, of the store's shapes and dtypes. Raises `CheckpointError` when a file has changed.

        What is written to them is seen by their holders alone: `write` has to be told of it.
        """
        ...

    def absent_pages(self, names: Sequence[str]) -> Callable[[], None] | None:
        """What reads the pages of these tensors that are not in memory, in any thread; None where samples say that all are."""
        ...


@runtime_checkable
class Offloaded(Protocol):
    """A tensor of a model that stands for bytes which rest elsewhere. Whoever gives it new ones says so to it: what brings them to the
    arithmetic knows it, and not the module that it is registered in."""

    def rests(self) -> str:
        """What keeps its bytes: `"cpu"` or `"disk"`."""
        ...

    def rest_in_memory(self, value: torch.Tensor) -> None:
        """Stands for `value` itself from now on (same shape, any dtype), brought to CPU if it is elsewhere."""
        ...

    def rest_in(self, store: Store, name: str) -> None:
        """Stands for what `store` keeps as `name` from now on."""
        ...

    def way_back(self) -> Callable[[], None]:
        """What lets it stand again for what it stands for now."""
        ...

    def plain(self, data: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer like it, of the values `data`, which knows nothing of bytes elsewhere."""
        ...


@runtime_checkable
class WeightFormat(Protocol):
    """A packed format of weights, as far as a plan has to know it: which parameters it packs, and what each then takes.

    The room that packs owns these numbers. They are the bytes that loading allocates: the packed weight with all its companions
    (absmax, nested statistics, row scales).
    """

    @property
    def name(self) -> str:
        """What people call it: `"nf4"`, `"int8"`."""
        ...

    def packed_bytes(self, spec: TensorSpec) -> int:
        """Bytes of one weight of this shape and dtype once packed, companions included."""
        ...

    def packed_sizes(self, model: nn.Module) -> Mapping[str, int]:
        """Bytes once packed, by full name, of every parameter of `model` that this format packs. What is left as it is does not appear."""
        ...


class Packing(Protocol):
    """One weight on its way from a checkpoint to what is kept of it."""

    def pack(self, start: int, rows: torch.Tensor) -> None:
        """Takes rows (rows, columns), of which the first is `start`; those of a stack of matrices are counted through.

        Called by several threads at once, in any order.
        """
        ...

    def finish(self) -> Mapping[str, torch.Tensor]:
        """What is kept of the weight, by full name, once all rows are there. Called by the thread that began it."""
        ...


class Packer(Protocol):
    """Takes weights from a loader, in parts, as they arrive, and says what is kept of each."""

    def takes(self, name: str) -> bool:
        """Whether the weight of this full name is packed."""
        ...

    def transposed(self, name: str) -> bool:
        """Whether the weight is packed transposed: everything below is about the transposed one then."""
        ...

    def kept(self, name: str, spec: TensorSpec) -> Mapping[str, TensorSpec]:
        """What will be kept of a weight, by full name."""
        ...

    def row_step(self, spec: TensorSpec) -> int:
        """Parts begin at rows that are multiples of this; those of a stack of matrices are counted through."""
        ...

    def begin(self, name: str, spec: TensorSpec, device: torch.device) -> Packing:
        """The way of one weight, whose rows come in memory of `device`, and which is kept there."""
        ...
