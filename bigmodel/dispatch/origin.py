"""Origins: where the values of placeholders rest, how they are read and written, and the count of reads that come at the wrong time."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DispatchError
from ..protocols import PagedStore, Read, Store
from .stores import MemoryStore, ResidentStore
from .transforms import check_not_transformed, outside_transforms

if TYPE_CHECKING:
    from .group import Group

__all__ = ["Origin", "Tally"]

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Tally:
    """Counts, by name, how often placeholders of one model were read outside their group; warns once for each name."""

    def __init__(self) -> None:
        self.reads: dict[str, int] = {}
        self.bytes_read = 0
        self._warned_of_gradient = False
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tally:
        return memo.setdefault(id(self), Tally())

    def outside_read(self, name: str, function: str, nbytes: int) -> None:
        """One whole tensor was fetched because `function` read it."""
        with self._lock:
            first = name not in self.reads
            self.reads[name] = self.reads.get(name, 0) + 1
            self.bytes_read += nbytes
        if first:
            logger.warning(
                "%s is offloaded and was read by %s outside the forward of the module that brings it: each such read fetches %d bytes.",
                name,
                function,
                nbytes,
            )

    def no_gradient(self, name: str) -> None:
        """A weight that asks for a gradient takes part in a computation that cannot give it one."""
        if not self._warned_of_gradient:
            self._warned_of_gradient = True
            logger.warning(
                "%s has requires_grad=True but is offloaded: offloaded weights are frozen and get no gradient (inputs and adapters do). "
                "Use torch.no_grad() for inference, or keep the weights that you train resident.",
                name,
            )


class Origin:
    """Where the values of a placeholder rest, and the dtypes that they are cast to on the way.

    Shared by a placeholder and its aliases (`detach()`, `.data`): what is written through one is read through all of them.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        device: torch.device,
        *,
        casts: tuple[torch.dtype, ...] = (),
        tally: Tally | None = None,
        label: str | None = None,
        shared: bool = False,
    ) -> None:
        spec = store.spec(name)
        self.name = name
        self.label = label or name
        self.device = device
        """Where the arithmetic runs that reads these values."""
        self.shape = torch.Size(spec.shape)
        self.source = (store, casts)
        """One tuple, so that readers in other threads never see the store of one state with the casts of another."""
        self.tally = tally or Tally()
        self.group: weakref.ref[Group] | None = None
        self.restored: weakref.ref[torch.Tensor] | None = None
        """The plain tensor that took the placeholder's place when its weights were put back: ties stay ties."""
        self.modified = False
        """Whether values were written since it was made: they are kept nowhere else."""
        self._shared = shared
        self._copies: weakref.WeakSet[Origin] = weakref.WeakSet()
        self._lock = threading.RLock()

    @classmethod
    def of_value(cls, value: torch.Tensor, like: Origin) -> Origin:
        """An origin that keeps its own copy of `value` in RAM."""
        if value.device.type == "meta":
            raise DispatchError(
                f"{like.label} was given a tensor on meta, which has no values (a tensor made on an offloaded `weight.device` is one): "
                "do it in `with bigmodel.execution_devices():`, where weights answer the device that computes, or undispatch the model."
            )
        check_not_transformed(like.label, value)
        with torch.inference_mode(False):
            store = MemoryStore({like.name: value.detach().to(CPU, copy=True, memory_format=torch.contiguous_format)})
        made = cls(store, like.name, like.device, tally=like.tally, label=like.label)
        made.modified = True
        return made

    @property
    def store(self) -> Store:
        """Where the bytes rest."""
        return self.source[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that reading gives."""
        store, casts = self.source
        return casts[-1] if casts else store.spec(self.name).dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that reading gives."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_shared(self) -> bool:
        """Whether other origins read the same bytes, so that nobody may change them in place."""
        return self._shared or len(self._copies) > 0

    def held_in_group(self) -> tuple[Group, torch.Tensor] | None:
        """The real tensor and its group, if that is on the device now; the caller calls `exit` on the group when it is done."""
        group = self.group() if self.group is not None else None
        held = None if group is None else group.hold(self)
        return None if group is None or held is None else (group, held)

    def lender(self) -> Callable[[str], torch.Tensor] | None:
        """What gives the resting tensor itself, where it lies in RAM as it is to be read; None where reading has to copy.

        Bytes that a copy of the model reads too are never lent: a forward may change its weights in place.
        """
        store, casts = self.source
        if casts or self.is_shared or not isinstance(store, ResidentStore):
            return None
        return store.resident

    def pager(self) -> PagedStore | None:
        """The store that has the tensor on mapped pages of a file, as it is to be read; None where reading has to copy. See `lender`."""
        store, casts = self.source
        if casts or self.is_shared or not isinstance(store, PagedStore) or not store.is_paged(self.name):
            return None
        return store

    def copy(self, casts: tuple[torch.dtype, ...] = ()) -> Origin:
        """The same values, independent of later writes on either side; nothing is read until somebody writes."""
        with self._lock:
            store, own = self.source
            result = Origin(store, self.name, self.device, casts=own + casts, tally=self.tally, label=self.label, shared=True)
            result.modified = self.modified
            self._copies.add(result)
        self._tell_group()
        return result

    def _tell_group(self) -> None:
        group = self.group() if self.group is not None else None
        if group is not None:
            group.changed()

    def read_request(self, destination: torch.Tensor) -> tuple[Store, Read] | None:
        """What fills `destination` (on CPU, contiguous, of this origin's dtype) in one read; None where `read` takes several steps."""
        store, casts = self.source
        if len(casts) > 1 or (casts and not (casts[0].is_floating_point and store.spec(self.name).dtype.is_floating_point)):
            return None
        return store, Read(self.name, destination)

    def read(self, destination: torch.Tensor) -> None:
        """Fills `destination` (on CPU, contiguous, of this origin's dtype)."""
        request = self.read_request(destination)
        if request is not None:
            request[0].read_into([request[1]])
            return
        store, casts = self.source
        value = torch.empty(self.shape, dtype=store.spec(self.name).dtype, device=CPU)
        store.read_into([Read(self.name, value)])
        # Every rounding on the way is part of the value: `.half().float()` is not `.float()`.
        for dtype in casts:
            value = value.to(dtype)
        destination.copy_(value)

    def fetch(self, device: torch.device | None = None) -> torch.Tensor:
        """The values in memory of their own, on `device` (by default where the arithmetic runs)."""
        device = self.device if device is None else device
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
            value = torch.empty(self.shape, dtype=self.dtype, device=CPU)
            self.read(value)
            return value if device.type == "cpu" else value.to(device)

    def present_value(self) -> torch.Tensor:
        """The values in memory of their own where the arithmetic runs, as a forward that is running has left them so far."""
        held = self.held_in_group()
        if held is None:
            return self.fetch()
        try:
            with torch.no_grad():
                return held[1].detach().clone()
        finally:
            held[0].exit()

    def fetch_rows(self, rows: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """The rows `rows` (n, int64, on CPU) of the first dimension, on `device` (by default where the arithmetic runs)."""
        store, casts = self.source
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
            single = len(casts) <= 1
            value = torch.empty((rows.numel(), *self.shape[1:]), dtype=self.dtype if single else store.spec(self.name).dtype, device=CPU)
            store.read_rows(self.name, rows, value)
            for dtype in () if single else casts:
                value = value.to(dtype)
            return value.to(self.device if device is None else device)

    def write(self, value: torch.Tensor) -> None:
        """Makes `value` (same shape) what all aliases read from now on, and what the group computes with, if it is on its device now."""
        if value.shape != self.shape:
            raise DispatchError(f"{self.label} has shape {tuple(self.shape)}, the value to write has {tuple(value.shape)}.")
        check_not_transformed(self.label, value)
        with self._lock, torch.inference_mode(False), outside_transforms():
            for other in list(self._copies):
                other._settle()
            self.modified = True
            store, casts = self.source
            if casts or self._shared:
                # Rounding to the dtype of a file that keeps another one would lose what was written.
                self.source = (MemoryStore({self.name: value.detach().to(CPU, self.dtype, copy=True)}), ())
                self._shared = False
            else:
                store.write(self.name, value.detach())
        group = self.group() if self.group is not None else None
        if group is not None:
            with outside_transforms():
                group.written(self, value)

    def _settle(self) -> None:
        """Takes the present values out of a store that somebody is about to write to."""
        with self._lock:
            for other in list(self._copies):
                other._settle()
            if self._shared:
                self.source = (MemoryStore({self.name: self.fetch(CPU)}), ())
                self._shared = False
        self._tell_group()
