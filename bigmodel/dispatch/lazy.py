"""Lazy tensors: they answer questions about shape and dtype, and fetch or write through when their values are asked for."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import DispatchError
from ..protocols import Store
from .origin import CPU, Origin
from .stores import MemoryStore
from .transforms import outside_transforms

if TYPE_CHECKING:
    from .group import Group

__all__ = ["HANDLERS", "METADATA", "VIEWERS", "LazyTensor", "shares_memory", "version_of"]

METADATA: set[Any] = set()
"""Functions that are answered by the stand-in on meta (filled in `functions.py`)."""

HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {}
"""Functions that do not need the whole value, or need it elsewhere; each may return NotImplemented (filled in `functions.py`)."""

VIEWERS: list[Callable[[LazyTensor, torch.Tensor, torch.Tensor], Any]] = []
"""What makes a lazy view of a placeholder out of its fetched values and a view of them (filled in `functions.py`)."""

_NO_PARAMETER = "no_parameter"

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class LazyTensor(torch.Tensor):
    """A tensor on meta that knows its `Origin`. Questions about its shape and dtype are answered as they are; whatever reads or
    writes values fetches them or writes them through.

    Parameters and their aliases are of this one class, since `nn.Parameter(tensor)` insists that `detach()` keeps the class.
    """

    origin: Origin

    @staticmethod
    def _make(origin: Origin, requires_grad: bool, stand_in: torch.Tensor | None, *, is_parameter: bool) -> Any:
        with torch.inference_mode(False), outside_transforms():
            if stand_in is None:
                stand_in = torch.empty(origin.shape, dtype=origin.dtype, device="meta")
            made: Any = torch.Tensor._make_subclass(LazyTensor, stand_in, requires_grad)
        made.origin = origin
        if not is_parameter:  # the mark is on the others: a parameter's attributes travel to the real one
            made.__dict__[_NO_PARAMETER] = True
        return made

    @classmethod
    def of(cls, origin: Origin, requires_grad: bool = False, *, stand_in: torch.Tensor | None = None) -> Any:
        """The tensor that stands for what rests at `origin`; `stand_in` is on meta, of its shape, where the strides are not contiguous."""
        return LazyTensor._make(origin, requires_grad, stand_in, is_parameter=False)

    @property
    def _is_param(self) -> bool:
        """What `isinstance(tensor, nn.Parameter)` asks of a tensor of another class."""
        return _NO_PARAMETER not in self.__dict__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # The last thing that `nn.Parameter(placeholder)` does, to a fresh alias. What it gives is a real parameter with values of its own,
        # where they are computed with: it can be trained, and `load_state_dict(…, assign=True)` leaves nothing that rests elsewhere.
        origin, requires_grad = self.origin, self.requires_grad
        origin.tally.outside_read(origin.label, "Parameter", origin.nbytes)
        with torch.inference_mode(False), outside_transforms():
            real = torch.Tensor._make_subclass(nn.Parameter, origin.present_value(), requires_grad)
        self.__dict__.clear()
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        torch._C._swap_tensor_impl(self, real)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Like assigning `.data`. (torch does not pass this method by `__torch_function__`.)"""
        return HANDLERS[torch.Tensor.set_](torch.Tensor.set_, (self, *args), kwargs)

    def _use_count(self) -> int:
        # `torch.utils.swap_tensors` asks this of both tensors before it changes anything.
        raise DispatchError(
            f"{self.origin.label} is offloaded and cannot be swapped with another tensor: "
            "copy into it (copy_, .data = …, load_state_dict), or bigmodel.undispatch(model) first."
        )

    def adopt(self, origin: Origin) -> None:
        """Stands for the values at `origin` from now on (shape and dtype may differ), in the same object."""
        group = self.origin.group() if self.origin.group is not None else None
        stand_in = LazyTensor.of(origin)
        with torch._C.DisableTorchFunctionSubclass():
            _set_data(self, stand_in)
        self.origin = origin
        if group is not None:
            origin.group = weakref.ref(group)
            group.changed()

    # --- As `bigmodel.protocols.Offloaded` ---

    def rests(self) -> str:
        """What keeps its bytes: `"cpu"` or `"disk"`."""
        return self.origin.store.kind

    def rest_in_memory(self, value: torch.Tensor) -> None:
        """Stands for `value` itself from now on."""
        self.adopt(self._origin_in(MemoryStore({self.origin.name: value}), self.origin.name))
        self.origin.modified = True

    def rest_in(self, store: Store, name: str) -> None:
        """Stands for what `store` keeps as `name` from now on."""
        self.adopt(self._origin_in(store, name))

    def _origin_in(self, store: Store, name: str) -> Origin:
        return Origin(store, name, self.origin.device, tally=self.origin.tally, label=self.origin.label)

    def way_back(self) -> Callable[[], None]:
        """What lets it stand again for what it stands for now."""
        return functools.partial(self.adopt, self.origin)

    def plain(self, data: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer like it, of the values `data`, which knows nothing of bytes elsewhere."""
        if not self._is_param:
            return data
        requires_grad = self.requires_grad and (data.is_floating_point() or data.is_complex())
        made: torch.Tensor = torch.Tensor._make_subclass(self.__dict__.get("parameter_class", nn.Parameter), data.detach(), requires_grad)
        made.__dict__.update({key: value for key, value in self.__dict__.items() if key not in ("origin", "parameter_class")})
        return made

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
        return _run(func, args, kwargs, views=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # C++ callers (scripted modules, custom operators) come here without passing by __torch_function__.
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default and all(isinstance(tensor, LazyTensor) for tensor in args):
            return True  # `adopt` sets the data of one to that of another
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        made = LazyTensor._make(self.origin.copy(), self.requires_grad, None, is_parameter=self._is_param)
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
        self._memory: dict[int, int] = {}

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
                with outside_transforms():
                    held.requires_grad_(True)  # torch chooses kernels by it, even where no gradient is recorded
            if torch._C._current_graph_task_id() < 0:  # where the backward computes a checkpointed forward again, it is what is expected
                origin.tally.outside_read(origin.label, _function_name(self.function), origin.nbytes)
        self.reals[id(origin)] = (lazy, held, version_of(held), group)
        self._memory[id(held)] = held.untyped_storage()._cdata
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

    def out_of(self, data: Any, views: bool) -> Any:
        """`data` with a real tensor that was itself returned (by an in-place operation) replaced by its placeholder.

        With `views`, a view of fetched values becomes a lazy one: what is written to it would be lost otherwise.
        """
        if isinstance(data, torch.Tensor):
            for lazy, real, _, group in self.reals.values():
                if real is data:
                    return lazy
                if views and group is None and _is_view(data, real):
                    return VIEWERS[0](lazy, real, data)
        elif type(data) in (list, tuple):
            return type(data)(self.out_of(item, views) for item in data)
        return data

    def finish(self) -> None:
        """Writes back what the call changed, and lets go of groups that were held."""
        for lazy, real, version, group in self.reals.values():
            try:
                if real.untyped_storage()._cdata != self._memory[id(real)]:
                    raise DispatchError(
                        f"{lazy.origin.label} is offloaded and has no storage that {_function_name(self.function)} could exchange: "
                        "assign its .data, or copy_ into it."
                    )
                if version_of(real) != version:
                    lazy.origin.write(real)
            finally:
                if group is not None:
                    group.exit()


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; 0 for one made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory (on meta: would)."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def _is_view(tensor: torch.Tensor, of: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.numel() > 0 and shares_memory(tensor, of)


def _run(func: Any, args: Any, kwargs: Any, *, views: bool = False) -> Any:
    """Calls `func` with the real tensors; what it changes in place is written through."""
    substitution = _Substitution(func)
    try:
        result = func(*substitution.into(args), **substitution.into(kwargs))
        return substitution.out_of(result, views)
    finally:
        substitution.finish()
