"""Lazy tensors: they answer questions about shape and dtype, and fetch or write through when their values are asked for."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .origin import CPU, Origin

if TYPE_CHECKING:
    from .group import Group

__all__ = ["HANDLERS", "METADATA", "LazyTensor"]

METADATA: set[Any] = set()
"""Functions that are answered by the stand-in on meta (filled in `functions.py`)."""

HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {}
"""Functions that do not need the whole value, or need it elsewhere; each may return NotImplemented (filled in `functions.py`)."""

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class LazyTensor(torch.Tensor):
    """A tensor on meta that knows its `Origin`. Questions about its shape and dtype are answered as they are; whatever reads or
    writes values fetches them or writes them through."""

    origin: Origin

    @staticmethod
    def _make(cls: type[LazyTensor], origin: Origin, requires_grad: bool = False, stand_in: torch.Tensor | None = None) -> Any:
        with torch.inference_mode(False):
            if stand_in is None:
                stand_in = torch.empty(origin.shape, dtype=origin.dtype, device="meta")
            made: Any = torch.Tensor._make_subclass(cls, stand_in, requires_grad)
        made.origin = origin
        return made

    @classmethod
    def of(cls, origin: Origin, requires_grad: bool = False, *, stand_in: torch.Tensor | None = None) -> Any:
        """The placeholder for what rests at `origin`; `stand_in` is a meta tensor of its shape, where the strides are not contiguous."""
        return LazyTensor._make(cls, origin, requires_grad, stand_in)

    def adopt(self, origin: Origin) -> None:
        """Stands for the values at `origin` from now on (shape and dtype may differ), in the same object."""
        group = self.origin.group() if self.origin.group is not None else None
        stand_in = LazyTensor._make(LazyTensor, origin)
        with torch._C.DisableTorchFunctionSubclass():
            _set_data(self, stand_in)
        self.origin = origin
        if group is not None:
            origin.group = weakref.ref(group)
            group.changed()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # C++ callers (scripted modules, custom operators) come here without passing by __torch_function__.
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        made = type(self).of(self.origin.copy(), self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key != "origin"})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.origin.fetch(CPU)
        return (nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value).__reduce_ex__(protocol)


def _function_name(function: Any) -> str:
    name = getattr(function, "__name__", None) or str(function)
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


class _Substitution:
    """The real tensors that take the place of placeholders in one call."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.reals: dict[int, tuple[LazyTensor, torch.Tensor, int, Group | None]] = {}

    def real(self, lazy: LazyTensor) -> torch.Tensor:
        origin = lazy.origin
        known = self.reals.get(id(origin))
        if known is not None:
            return known[1]
        if lazy.requires_grad and torch.is_grad_enabled():
            origin.tally.no_gradient(origin.label)
        in_group = origin.held_in_group()
        if in_group is not None:
            group, held = in_group
        else:
            group = None
            held = origin.fetch()
            if lazy.requires_grad and not torch.is_grad_enabled():
                held.requires_grad_(True)  # torch chooses kernels by it, even where no gradient is recorded
            origin.tally.outside_read(origin.label, _function_name(self.function), origin.nbytes)
        self.reals[id(origin)] = (lazy, held, _version(held), group)
        return held

    def into(self, data: Any) -> Any:
        """`data` with placeholders, at any depth of lists, tuples and dicts, replaced by real tensors."""
        if isinstance(data, LazyTensor):
            return self.real(data)
        if isinstance(data, (list, tuple)):
            items = [self.into(item) for item in data]
            if all(new is old for new, old in zip(items, data, strict=True)):
                return data
            return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
        if isinstance(data, dict):
            return {key: self.into(value) for key, value in data.items()}
        return data

    def out_of(self, data: Any) -> Any:
        """`data` with a real tensor that was itself returned (by an in-place operation) replaced by its placeholder."""
        if isinstance(data, torch.Tensor):
            for lazy, real, _, _ in self.reals.values():
                if real is data:
                    return lazy
        elif type(data) in (list, tuple):
            return type(data)(self.out_of(item) for item in data)
        return data

    def finish(self) -> None:
        """Writes back what the call changed, and lets go of groups that were held."""
        for lazy, real, version, group in self.reals.values():
            try:
                if _version(real) != version:
                    lazy.origin.write(real)
            finally:
                if group is not None:
                    group.exit()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls `func` with the real tensors; what it changes in place is written through."""
    substitution = _Substitution(func)
    try:
        result = func(*substitution.into(args), **substitution.into(kwargs))
        return substitution.out_of(result)
    finally:
        substitution.finish()
