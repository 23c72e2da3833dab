"""Views of placeholders (`weight[0]`, `weight.t()`): lazy as well, so that what is written to a view reaches the bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..protocols import Read, Store
from .lazy import LazyTensor
from .origin import CPU, Origin

__all__ = ["View", "view_of"]


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

    def held_in_group(self) -> tuple[Any, torch.Tensor] | None:
        held = self.base.held_in_group()
        return None if held is None else (held[0], self.apply(held[1]))

    def lender(self) -> Callable[[str], torch.Tensor] | None:
        return None

    def copy(self, casts: tuple[torch.dtype, ...] = ()) -> Origin:
        kept = Origin.of_value(self.fetch(CPU), self)
        return kept.copy(casts) if casts else kept

    def read_request(self, destination: torch.Tensor) -> tuple[Store, Read] | None:
        return None

    def read(self, destination: torch.Tensor) -> None:
        destination.copy_(self.fetch(CPU))

    def fetch(self, device: torch.device | None = None) -> torch.Tensor:
        with torch.no_grad():
            return self.apply(self.base.fetch(device))

    def write(self, value: torch.Tensor) -> None:
        whole = self.base.fetch(CPU)
        with torch.no_grad():
            self.apply(whole).copy_(value)
        self.base.write(whole)


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
    with torch._C.DisableTorchFunctionSubclass():
        whole = torch.empty_strided(lazy.size(), lazy.stride(), dtype=lazy.dtype, device="meta")
    stand_in = func(whole, *rest, **kwargs)
    if stand_in._base is not whole:
        return NotImplemented
    return LazyTensor.of(View(lazy.origin, lambda value: func(value, *rest, **kwargs), stand_in), stand_in=stand_in)
