"""Groups: the weights that travel together, and the pointer swap that puts them into their modules and takes them out again."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..constants import KiB
from ..errors import BigModelError, DispatchError
from ..waiting import result_of
from .buffers import Buffer
from .layout import Layout, Owner, Reading, Slot, lay_out, swap_parameter
from .lazy import LazyTensor, version_of
from .pool import Pool
from .recording import Mark
from .transforms import in_transform, outside_transforms

__all__ = ["SMALL_BYTES", "Counters", "Group"]

SMALL_BYTES = 256 * KiB
"""Groups in RAM below this many bytes are read when they are needed: handing one to the reader thread takes about as long (30 µs)."""


_keys = itertools.count()


@dataclass(slots=True)
class Counters:
    """What a group has done so far."""

    forwards: int = 0
    hits: int = 0
    """Times that its bytes were on the device already, or on their way."""
    misses: int = 0
    """Times that the forward had to start the transfer itself."""
    bytes_moved: int = 0
    stall_seconds: float = 0.0
    """Time that forwards waited for bytes (on the host)."""


class _Present(NamedTuple):
    slot: Slot
    real: torch.Tensor
    version: int
    owners: list[Owner]
    returns: bool
    """Whether what a forward writes to it has to be brought to where it rests."""


class Group:
    """Weights that are brought to one device together, for as long as at least one forward uses them.

    Several threads may be in at once: the first one in brings the weights, the last one out puts the resting tensors back.
    """

    def __init__(self, name: str, slots: Iterable[Slot], pool: Pool, *, beside: bool = False) -> None:
        self.name = name
        self.slots = list(slots)
        self.pool = pool
        self.key = next(_keys)
        """What the pool knows it by, so that it need not refer to it."""
        self.beside = beside
        """Whether it is in use while other groups are: a tie, or what a module around others holds itself."""
        self.counters = Counters()
        self.generation = 0
        """Grows whenever what the bytes on a device should be has changed."""
        self.pages_ahead: list[Future[None]] | None = None
        """The reads of its pages that were begun since its last use; None if nobody looked."""
        self._layout: Layout | None = None
        self._uses = 0
        self._lookups = 0
        self._lock = threading.RLock()
        self._buffer: Buffer | None = None
        self._present: list[_Present] = []
        self._began: Mark | None = None
        """When it was put in, while that is recorded."""
        for slot in self.slots:
            if isinstance(slot.resting, LazyTensor):
                slot.resting.origin.group = weakref.ref(self)
        pool.register(self)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {len(self.slots)} tensors, {self.nbytes} bytes, {self.pool.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        if self.in_use:
            raise DispatchError(f"{self.name or 'the model'} is running: copy a dispatched model between its forwards, not during one.")
        slots = [
            Slot(
                slot.name,
                [owner.copied(memo) for owner in slot.owners if owner.module is not None],
                deepcopy(slot.resting, memo),
                slot.parameter_class,
                slot.original_device,
            )
            for slot in self.slots
        ]
        made = Group(self.name, slots, deepcopy(self.pool, memo), beside=self.beside)
        memo[id(self)] = made
        return made

    @property
    def in_use(self) -> bool:
        """Whether its weights are in their modules now."""
        return self._uses > 0

    def present_tensors(self) -> list[torch.Tensor]:
        """The real tensors that are in their modules now."""
        with self._lock:
            return [present.real for present in self._present]

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer that it needs; 0 where its weights are used in place."""
        return self.layout.reading.nbytes

    @property
    def travels(self) -> bool:
        """Whether its bytes are worth being brought ahead."""
        return self.layout.travels

    @property
    def paged_bytes(self) -> int:
        """Bytes that are used on mapped pages of files."""
        return self.layout.paged_bytes

    @property
    def layout(self) -> Layout:
        """Where every tensor lies in the flat buffer."""
        layout = self._layout
        if layout is None:
            layout = self._layout = lay_out(self.slots, self.pool.device, self.generation)
        return layout

    @property
    def reading(self) -> Reading:
        """What fills a buffer with its weights, as they are to be now."""
        return self.layout.reading

    def absent_pages(self) -> list[Callable[[], None]]:
        """What reads the pages of files that it needs and that are not in memory; it refers to no module."""
        found = [paged.store.absent_pages(paged.names) for paged in self.layout.paged]
        return [read for read in found if read is not None]

    # --- Changes from outside ---

    def changed(self) -> None:
        """A placeholder of this group stands for something else (another dtype, another store) from now on."""
        self.generation += 1
        self._layout = None
        self.pool.register(self)

    def written(self, origin: Any, value: torch.Tensor) -> None:
        """The value that rests at `origin` was replaced by `value`."""
        with self._lock:
            self.changed()
            for index, present in enumerate(self._present):
                if isinstance(present.slot.resting, LazyTensor) and present.slot.resting.origin is origin:
                    with torch.no_grad():
                        if present.real is not value:
                            present.real.copy_(value)
                    self._present[index] = present._replace(version=version_of(present.real))

    # --- In and out ---

    def enter(self) -> None:
        """Puts the real weights into their modules, once for all that are in at the same time."""
        with self._lock:
            if self._uses == 0:
                if in_transform():
                    with outside_transforms():
                        self._swap_in()
                else:
                    self._swap_in()
            elif self._buffer is not None:
                self.pool.wait_ready(self._buffer)
            self._uses += 1
            self.counters.forwards += 1

    def exit(self) -> None:
        """The counterpart of `enter`; the last one out puts the resting tensors back."""
        with self._lock:
            self._uses -= 1
            if self._uses == 0:
                if in_transform():
                    with outside_transforms():
                        self._swap_out()
                else:
                    self._swap_out()
            elif self._buffer is not None:
                self.pool.mark_used(self._buffer)

    def begin_lookup(self) -> None:
        """A forward begins that reads single rows of the weights where they rest."""
        with self._lock:
            self._lookups += 1

    def end_lookup(self) -> None:
        """The counterpart of `begin_lookup`."""
        with self._lock:
            self._lookups -= 1

    @property
    def is_looked_up(self) -> bool:
        """Whether a forward reads rows now: code in it that asks for the weight's device means the one that it runs on."""
        return self._lookups > 0

    def hold(self, origin: Any) -> torch.Tensor | None:
        """The real tensor of `origin` if the group is in use, which it then is until `exit` is called once more; None otherwise."""
        with self._lock:
            if self._uses:
                for present in self._present:
                    if isinstance(present.slot.resting, LazyTensor) and present.slot.resting.origin is origin:
                        self._uses += 1
                        return present.real
        return None

    def place_of(self, storage: int, offset: int, dtype: torch.dtype) -> tuple[Slot, int] | None:
        """The slot at byte `offset` of the memory `storage`, and the bytes from its beginning; None if that is not this group's."""
        if self.paged_bytes:
            for present in self._present:
                if present.returns and present.real.dtype == dtype and present.real.untyped_storage()._cdata == storage:
                    start = int(present.real.storage_offset()) * dtype.itemsize
                    if start <= offset < start + present.slot.nbytes:
                        return present.slot, offset - start
        if self._buffer is None or self._buffer.storage._cdata != storage:
            return None
        for slot, start, shape, _, kept in self.layout.places:
            if start <= offset < start + shape.numel() * kept.itemsize:
                return (slot, offset - start) if kept == dtype else None
        return None

    def _swap_in(self) -> None:
        layout = self._layout or self.layout
        if layout.paged_bytes >= SMALL_BYTES:
            self._wait_for_pages()
        if layout.reading.nbytes:
            start = time.perf_counter()
            self._buffer, hit = self.pool.obtain(self)
            self.counters.stall_seconds += time.perf_counter() - start
            self.counters.hits += hit
            self.counters.misses += not hit
            self.counters.bytes_moved += self._buffer.moved_bytes
            self._buffer.moved_bytes = 0
            self.pool.wait_ready(self._buffer)
        try:
            if torch.is_inference_mode_enabled():
                # Views made in inference mode could not be used by a forward of another thread that trains.
                with torch.inference_mode(False):
                    self._put_in(layout)
            else:
                self._put_in(layout)
        except BaseException:
            self._swap_out()
            raise
        if self.pool.log is not None:
            self._began = self.pool.log.mark(self.pool.device)

    def _wait_for_pages(self) -> None:
        ahead, self.pages_ahead = self.pages_ahead, None
        absent = self.pool.recorded_pages(self) if ahead is None else []
        self.counters.hits += not absent
        self.counters.misses += bool(absent)
        if ahead or absent:
            start = time.perf_counter()
            for reading in ahead or []:
                with contextlib.suppress(BigModelError, CancelledError):  # what is wrong with a file is told when the tensor is asked for
                    result_of(reading)
            for read in absent:
                read()
            self.counters.stall_seconds += time.perf_counter() - start

    def _put_in(self, layout: Layout) -> None:
        # Which kernel torch chooses depends on whether a weight requires a gradient, even where none is recorded; where one could be
        # recorded the weights are frozen, since they will be gone at the backward.
        frozen = torch.is_grad_enabled()
        device = self.pool.device
        with torch._C.DisableTorchFunctionSubclass():
            for slot, offset, shape, stride, dtype in layout.places:
                assert self._buffer is not None
                view = torch.empty(0, dtype=dtype, device=device).set_(self._buffer.storage, offset // dtype.itemsize, shape, stride)
                resting = slot.resting
                if frozen and resting.requires_grad:
                    _tell_frozen(resting)
                self._put(slot, swap_parameter(slot.parameter_class, view, resting, resting.requires_grad and not frozen), returns=True)
            for lent in layout.lent:
                asks = lent.slot.resting.requires_grad
                if frozen and asks:
                    _tell_frozen(lent.slot.resting)
                self._put(lent.slot, lent.lent(asks and not frozen), returns=False)
            for store, names, in_place in layout.paged:
                for place, value in zip(in_place, store.pages(names), strict=True):
                    resting = place.slot.resting
                    asks = resting.requires_grad
                    if frozen and asks:
                        _tell_frozen(resting)
                    self._put(place.slot, place.real(value, asks and not frozen), returns=True)
            for slot in layout.elsewhere:
                resting = slot.resting
                if resting.requires_grad and frozen:
                    real = resting.to(device)  # a differentiable copy: the gradient reaches the one that rests
                else:
                    real = swap_parameter(slot.parameter_class, resting.detach().to(device), resting, resting.requires_grad)
                self._put(slot, real, returns=False)

    def _put(self, slot: Slot, real: torch.Tensor, *, returns: bool) -> None:
        swapped = []
        resting = slot.resting
        for owner in slot.owners:
            table, attribute = owner.table, owner.attribute
            # Whoever assigned another tensor (a replaced parameter, `torch.func.functional_call`) computes with that one.
            if table.get(attribute) is resting:
                table[attribute] = real
                swapped.append(owner)
        self._present.append(_Present(slot, real, version_of(real), swapped, returns))

    def _swap_out(self) -> None:
        began, self._began = self._began, None
        if began is not None and self.pool.log is not None:
            self.pool.log.add("compute", self.name, self.pool.device, began, self.pool.log.mark(self.pool.device))
        present, self._present = self._present, []
        buffer, self._buffer = self._buffer, None
        changed = []
        for slot, real, version, owners, returns in present:
            for owner in owners:
                table, attribute = owner.table, owner.attribute
                if table.get(attribute) is real:
                    table[attribute] = slot.resting
            if returns and isinstance(slot.resting, LazyTensor) and (version_of(real) != version or _statistics(slot, owners)):
                changed.append((slot.resting.origin, real.detach().to("cpu", copy=True)))
        del present
        slot = real = owners = None  # type: ignore[assignment]
        for origin, value in changed:
            origin.write(value)
        if buffer is not None:
            self.pool.release(buffer, self)


def _tell_frozen(resting: torch.Tensor) -> None:
    if isinstance(resting, LazyTensor):
        resting.origin.tally.no_gradient(resting.origin.label)


def _statistics(slot: Slot, owners: list[Owner]) -> bool:
    """Whether the slot is a buffer that a training forward may have updated (kernels do that without telling)."""
    return slot.parameter_class is None and any((module := owner.module) is not None and module.training for owner in owners)
