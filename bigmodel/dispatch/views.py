"""Views of placeholders (`weight[0]`, `weight.t()`, `weight.chunk(2)`): lazy as well, so that what is written to one reaches the bytes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import DispatchError
from ..protocols import PagedStore, Read, Store
from .lazy import LazyTensor, shares_memory
from .origin import CPU, Origin
from .transforms import outside_transforms

__all__ = ["View", "alike", "iterate", "view_by_strides", "view_of"]


class View(Origin):
    """The origin of a view: the base's origin, and the function that makes the view of the base's values."""

    def __init__(self, base: Origin, make: Callable[[torch.Tensor], torch.Tensor], stand_in: torch.Tensor) -> None:
        self.base = base
        self.apply = make
        self.name = base.name
        self.label = base.label
        self.device = base.device
        self.tally = base.tally
        self.shape = stand_in.shape
        self.source = (base.store, (stand_in.dtype,))
        self.group = None
        self.restored = None
        self.modified = True
        self._shared = False
        self._copies = weakref.WeakSet()
        self._lock = threading.RLock()
        self._rows = _rows_of(base, stand_in)

    def held_in_group(self) -> tuple[Any, torch.Tensor] | None:
        held = self.base.held_in_group()
        return None if held is None else (held[0], self.apply(held[1]))

    def lender(self) -> Callable[[str], torch.Tensor] | None:
        return None

    def pager(self) -> PagedStore | None:
        return None

    def copy(self, casts: tuple[torch.dtype, ...] = ()) -> Origin:
        kept = Origin.of_value(self.fetch(CPU), self)
        return kept.copy(casts) if casts else kept

    def read_request(self, destination: torch.Tensor) -> tuple[Store, Read] | None:
        return None

    def read(self, destination: torch.Tensor) -> None:
        destination.copy_(self.fetch(CPU))

    def fetch(self, device: torch.device | None = None) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
            if self._rows is not None:
                return self.base.fetch_rows(torch.arange(self._rows.start, self._rows.stop), device).view(self.shape)
            return self.apply(self.base.fetch(device))

    def write(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise DispatchError(f"This view of {self.label} has shape {tuple(self.shape)}, the value to write has {tuple(value.shape)}.")
        with self._whole() as whole:
            with torch.no_grad():
                part = self.apply(whole)
                if not shares_memory(part, whole):
                    raise DispatchError(f"{self.label} is offloaded, and this view of it cannot be written to: write to the weight itself.")
                part.copy_(value)
            self.base.write(whole)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[torch.Tensor]:
        """The base's values, those of a forward that is running where one is: it may have changed them."""
        held = self.base.held_in_group()
        if held is None:
            yield self.base.fetch(CPU)
            return
        try:
            yield held[1].detach()
        finally:
            held[0].exit()


def _rows_of(base: Origin, stand_in: torch.Tensor) -> range | None:
    """The rows of the base that a view is made of, where it is whole rows, but not all: these alone are read then."""
    store, _ = base.source
    if isinstance(base, View) or len(base.shape) < 2 or not store.spec(base.name).dtype.is_floating_point:
        return None
    if stand_in.dtype != base.dtype or not stand_in.dtype.is_floating_point or not stand_in.is_contiguous():
        return None
    row = base.shape[1:].numel()
    count, rest = divmod(stand_in.numel(), row) if row else (0, 0)
    first, skipped = divmod(int(stand_in.storage_offset()), row) if row else (0, 0)
    return range(first, first + count) if 0 < count < base.shape[0] and rest == 0 and skipped == 0 else None


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts)


def view_of(func: Any, args: Any, kwargs: Any) -> Any:
    """What a view function gives for a placeholder; NotImplemented where its result is no view."""
    if not isinstance(args[0] if args else None, LazyTensor) or any(
        isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())
    ):
        return NotImplemented
    lazy, rest = args[0], args[1:]
    if func is torch.Tensor.__getitem__ and not _is_basic(rest[0]):
        return NotImplemented
    if torch.is_grad_enabled() and lazy.requires_grad:
        lazy.origin.tally.no_gradient(lazy.origin.label)
    whole = _stand_in(lazy)
    with torch.inference_mode(False), outside_transforms():
        result = func(whole, *rest, **kwargs)
    if result is whole:
        return lazy
    if isinstance(result, torch.Tensor):
        if not shares_memory(result, whole):
            return NotImplemented
        return LazyTensor.of(View(lazy.origin, lambda value: func(value, *rest, **kwargs), result), stand_in=result)
    if not all(shares_memory(part, whole) for part in result):
        return NotImplemented
    if func in _UNBIND:
        dim = rest[0] if rest else kwargs.get("dim", 0)
        makers: list[Callable[[torch.Tensor], torch.Tensor]] = [_Selected(dim, index) for index in range(len(result))]
    else:
        makers = [_Part(func, rest, kwargs, index) for index in range(len(result))]
    parts = [LazyTensor.of(View(lazy.origin, make, part), stand_in=part) for make, part in zip(makers, result, strict=True)]
    return type(result)(parts)


_UNBIND = (torch.Tensor.unbind, torch.unbind)


class _Selected:
    def __init__(self, dim: Any, index: int) -> None:
        self._dim, self._index = dim, index

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.select(self._dim, self._index)


class _Part:
    def __init__(self, func: Any, rest: Any, kwargs: Any, index: int) -> None:
        self._func, self._rest, self._kwargs, self._index = func, rest, kwargs, index

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self._func(value, *self._rest, **self._kwargs)[self._index]
        return part


def _stand_in(lazy: LazyTensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), outside_transforms():
        return torch.empty_strided(lazy.size(), lazy.stride(), dtype=lazy.dtype, device="meta")


def iterate(func: Any, args: Any, kwargs: Any) -> Any:
    """`for row in weight`: every row a view."""
    rows = view_of(torch.Tensor.unbind, args, {}) if args[0].dim() else NotImplemented
    return rows if rows is NotImplemented else iter(rows)


def alike(func: Any) -> Callable[[Any, Any, Any], Any]:
    """For functions that take the shape from another tensor: `func` is the one that takes a shape."""

    def handle(_: Any, args: Any, kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 2:
            return NotImplemented
        tensor, other = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if not isinstance(other, torch.Tensor):
            return NotImplemented
        return func(tensor, tuple(other.shape))

    return handle


def view_by_strides(lazy: LazyTensor, real: torch.Tensor, view: torch.Tensor) -> Any:
    """The lazy counterpart of `view`, which some function has made of `real`, the fetched values of `lazy`."""
    if view.dtype != real.dtype or view.is_conj() or view.is_neg():
        raise DispatchError(
            f"{lazy.origin.label} is offloaded, and a view of it as {view.dtype} made in this way cannot be written through: "
            "take the view of a copy (weight.clone()), or of the weight within its module's forward."
        )
    size, stride, offset = view.size(), view.stride(), view.storage_offset() - real.storage_offset()
    strides = real.stride()

    def make(value: torch.Tensor) -> torch.Tensor:
        if value.stride() != strides:  # as_strided means memory as it lies
            value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
        return value.as_strided(size, stride, value.storage_offset() + offset)

    stand_in = torch.empty_strided(size, stride, dtype=view.dtype, device="meta")
    origin = View(lazy.origin, make, stand_in)
    return LazyTensor.of(origin, stand_in=stand_in)
