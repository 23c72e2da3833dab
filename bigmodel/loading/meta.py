"""Building models without memory: their parameters appear on the meta device, in this thread alone."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.utils._device
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from ..collecting import without_collecting
from ..settings import environment_flag
from .replace import new_parameter

__all__ = ["init_empty_weights", "init_on_device"]


def _remember_what_device_contexts_redirect() -> None:
    """Makes torch collect the functions that `with torch.device(…)` redirects, anew and now.

    torch does so once, at the first such context. transformers replaces one of them (`torch.linspace`) while it builds a model on meta; a
    first context in that moment leaves the real one out for the rest of the process, and computed buffers miss the meta device.
    """
    redirected: Any = getattr(torch.utils._device, "_device_constructors", None)
    if hasattr(redirected, "cache_clear"):
        redirected.cache_clear()
    with torch.device("cpu"):
        torch.empty(0)


_remember_what_device_contexts_redirect()


class _Contexts(threading.local):
    """The contexts that this thread is in."""

    def __init__(self) -> None:
        self.stack: list[_Registration] = []
        """Those that move parameters, innermost last."""
        self.on_meta = 0
        """How many of them leave meta tensors unfilled."""


_lock = threading.Lock()
_users = 0
_hook: Any = None


_contexts = _Contexts()

_FILLING_METHODS: Final = ("uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_", "random_", "bernoulli_")
"""Methods of tensors that only give values, and take long on meta: torch computes shapes, some of them in Python."""


def _unless_on_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fill(*args: Any, **kwargs: Any) -> Any:
        if _contexts.on_meta:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return original(*args, **kwargs)

    return fill


class _Unfilled:
    """While any thread is in a context: functions that fill a tensor return a meta tensor as it is, in the threads that are in one.

    A `TorchFunctionMode` would reach the same, at the price of a Python call for everything that torch does meanwhile.
    """

    def __init__(self) -> None:
        names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
        self._places = [(nn.init, name) for name in names] + [(torch.Tensor, name) for name in _FILLING_METHODS]
        self._users = 0
        self._lock = threading.Lock()
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._install()
            self._users += 1
        _contexts.on_meta += 1
        try:
            yield
        finally:
            _contexts.on_meta -= 1
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._remove()

    def _install(self) -> None:
        for holder, name in self._places:
            original = getattr(holder, name)
            fill = _unless_on_meta(original)
            self._replaced.append((holder, name, vars(holder).get(name), fill))
            setattr(holder, name, fill)

    def _remove(self) -> None:
        for holder, name, original, fill in self._replaced:
            if vars(holder).get(name) is not fill:
                continue  # somebody else has replaced it since, and will put back what is here now: it does nothing outside of a context
            if original is None:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        self._replaced.clear()


_unfilled = _Unfilled()


class _Registration:
    """Moves parameters when they are registered, and remembers which became which: a tie made before the registration is kept too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def moved(self, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.device == self._device or is_lazy(parameter):
            return None
        known = self._moved.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        new = new_parameter(parameter, parameter.detach().to(self._device))
        self._moved[id(parameter)] = (weakref.ref(parameter), new)
        return new


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """torch calls this in every thread; only those inside a context see an effect."""
    if parameter is None or not _contexts.stack:
        return None
    return _contexts.stack[-1].moved(parameter)


@contextlib.contextmanager
def _moving_parameters(device: torch.device) -> Iterator[None]:
    global _users, _hook
    with _lock:
        if _users == 0:
            _hook = register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]  # its result counts
        _users += 1
    _contexts.stack.append(_Registration(device))
    try:
        yield
    finally:
        _contexts.stack.pop()
        with _lock:
            _users -= 1
            if _users == 0:
                _hook.remove()
                _hook = None


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Modules built inside have their parameters on meta: no memory, no initialisation. Ties made inside are kept.

    `include_buffers=True` puts buffers there too, so computed ones (rotary tables) lose their values; by default they are real, on CPU.
    None reads `BIGMODEL_INIT_INCLUDE_BUFFERS` (or `ACCELERATE_INIT_INCLUDE_BUFFERS`). Other threads are not affected.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Modules built inside have their parameters on `device`; with `include_buffers=True` every tensor made there.

    See `init_empty_weights`.
    """
    if include_buffers is None:
        include_buffers = environment_flag("INIT_INCLUDE_BUFFERS")
    device = torch.empty(0, device=device).device  # with its index: only then do two parameters on it compare equal
    with contextlib.ExitStack() as stack:
        stack.enter_context(device if include_buffers else _moving_parameters(device))
        if device.type == "meta":
            stack.enter_context(_unfilled.in_this_thread())
            stack.enter_context(without_collecting())
        yield
