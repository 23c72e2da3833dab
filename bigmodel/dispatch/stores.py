"""Stores in RAM: tensors of a model that rest on CPU, and any mapping from names to tensors that a caller brings."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from ..errors import DispatchError
from ..protocols import Read, Store, TensorSpec

__all__ = ["MappingStore", "MemoryStore", "ResidentStore", "as_store"]


@runtime_checkable
class ResidentStore(Store, Protocol):
    """A store whose tensors lie in RAM as they are: arithmetic on CPU can run on them without a copy."""

    def resident(self, name: str) -> torch.Tensor:
        """The tensor itself. Raises KeyError."""
        ...


class _RamStore:
    """What both stores share: reading is copying out of a CPU tensor."""

    kind = "cpu"

    def _tensor(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of `name`. Raises KeyError."""
        tensor = self._tensor(name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def read_into(self, reads: Sequence[Read]) -> None:
        """Copies every tensor to its destination, cast to the destination's dtype."""
        for read in reads:
            read.destination.copy_(self._tensor(read.name))

    def read_rows(self, name: str, rows: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the rows `rows` (n, int64) of `name` to `destination` (n, …)."""
        tensor = self._tensor(name)
        if destination.dtype == tensor.dtype and tensor.device.type == "cpu":
            torch.index_select(tensor, 0, rows, out=destination)
        else:
            destination.copy_(tensor.index_select(0, rows.to(tensor.device)))


class MemoryStore(_RamStore):
    """Tensors in RAM, by full name. The store owns them: `write` replaces, it never changes a tensor in place."""

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in (tensors or {}).items():
            self.put(name, tensor)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Takes `tensor` itself, detached; brought to CPU if it is elsewhere."""
        self._tensors[name] = tensor.detach().to("cpu")

    def names(self) -> Collection[str]:
        """The names kept here."""
        return self._tensors.keys()

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def resident(self, name: str) -> torch.Tensor:
        """The tensor itself. Raises KeyError."""
        return self._tensors[name]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Puts a copy of `value` in the place of `name`, in the dtype kept so far. Raises KeyError."""
        self._tensors[name] = value.detach().to("cpu", self._tensors[name].dtype, copy=True)


class MappingStore(_RamStore):
    """Any `Mapping[str, Tensor]` (a state dict, an `OffloadedWeightsLoader`, a `PrefixedDataset`).

    The mapping is only read. What `write` brings is kept beside it. A mapping that reads its values from files says so with `kind="disk"`.
    """

    def __init__(self, mapping: Mapping[str, torch.Tensor], *, kind: str = "cpu") -> None:
        self.mapping = mapping
        self.kind = kind
        self._written: dict[str, torch.Tensor] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._lock = threading.Lock()

    def names(self) -> Collection[str]:
        """The names in the mapping."""
        return list(self.mapping)

    def _tensor(self, name: str) -> torch.Tensor:
        written = self._written.get(name)
        if written is not None:
            return written
        tensor = self.mapping[name]
        if not isinstance(tensor, torch.Tensor):
            raise DispatchError(
                f"The weights map gives {type(tensor).__name__} for {name!r}, not a tensor: pass one that maps names to tensors."
            )
        return tensor.detach()

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of `name`; the value is read once for it. Raises KeyError."""
        with self._lock:
            known = self._specs.get(name)
        if known is None:
            known = super().spec(name)
            with self._lock:
                self._specs[name] = known
        return known

    def write(self, name: str, value: torch.Tensor) -> None:
        """Keeps a copy of `value`, on CPU and in the mapping's dtype, which later reads give. Raises KeyError."""
        self._written[name] = value.detach().to("cpu", self.spec(name).dtype, copy=True)


def as_store(weights: Mapping[str, torch.Tensor] | Store) -> Store:
    """A store around `weights`: a plain dict of CPU tensors rests in RAM as it is, other mappings are asked for each read."""
    if isinstance(weights, Store):
        return weights
    if type(weights) is dict and all(isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" for tensor in weights.values()):
        return MemoryStore(weights)
    return MappingStore(weights)
