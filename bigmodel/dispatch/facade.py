"""What a dispatched model shows to its callers: `to` and `cuda` that do not tear it apart, its `device`, where inputs go, and its map."""

from __future__ import annotations

import copyreg
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..devices import accelerator_type
from ..errors import DispatchError
from .align import AlignDevicesHook
from .functions import shows_execution_devices
from .hooks import add_hook_to_module
from .lazy import LazyTensor

__all__ = ["put_on_facade", "replace_method", "show_device_map", "take_off_facade"]

logger = logging.getLogger("bigmodel.big_modeling")

_CLASS = "_bigmodel_plain_class"
_REPLACED = "_bigmodel_replaced_methods"
_DEVICE = "_bigmodel_main_device"
_MAP = "hf_device_map"


def show_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Leaves the map where helper libraries look for it, and gives the encoder of an encoder-decoder of transformers a hook if it has none.

    On a model with a map, generation asks this hook to bring the encoder's outputs back to the device of its inputs. Without one, it would
    make a hook from the package that usually dispatches models, which need not be installed.
    """
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    config: Any = getattr(model, "config", None)
    find_encoder: Any = getattr(model, "get_encoder", None)
    if not getattr(config, "is_encoder_decoder", False) or find_encoder is None:
        return
    encoder = find_encoder()
    if isinstance(encoder, nn.Module) and not hasattr(encoder, "_hf_hook"):
        add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))


def put_on_facade(model: nn.Module, main_device: torch.device) -> None:
    """Replaces the methods that would move the model, and makes `model.device` the main device where its class defines one."""
    model.__dict__[_DEVICE] = main_device
    moving = {method: _Mover(method) for method in {"to", "cuda", accelerator_type() or "cuda"} if hasattr(model, method)}
    _replace(model, moving)


def take_off_facade(model: nn.Module) -> None:
    """Undoes `put_on_facade`. Methods that others have replaced stay so."""
    model.__dict__.pop(_DEVICE, None)
    kept = {name: function for name, function in _replaced(model).items() if not isinstance(function, _Mover)}
    model.__class__ = _facade(_plain(model), frozenset(kept.items())) if kept else _plain(model)


def replace_method(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Makes `model.name(…)` call `function(model, …)`.

    As a method of a class of its own, under the same name: a function in the instance's dict would keep the model alive, or, if it did
    not, would have lost it in `load(…).name(…)`.
    """
    _replace(model, {name: function})


def _replace(model: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    plain, known = _plain(model), _replaced(model)
    model.__class__ = _facade(plain, frozenset({**known, **functions}.items()))


def _plain(model: nn.Module) -> Any:
    """The model's own class."""
    return type(model).__dict__.get(_CLASS, type(model))


def _replaced(model: nn.Module) -> dict[str, Callable[..., Any]]:
    return dict(type(model).__dict__.get(_REPLACED, ()))


@functools.cache
def _facade(plain: Any, replaced: frozenset[tuple[str, Any]]) -> type[nn.Module]:
    """The same class, under the same name, with some methods replaced, whose `device` is the main device of a dispatched instance."""
    namespace: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        _CLASS: plain,
        _REPLACED: replaced,
    }
    for name, function in replaced:
        namespace[name] = functools.update_wrapper(_method(function), getattr(plain, name))
    own_device = getattr(plain, "device", None)
    if isinstance(own_device, property):
        # An instance cannot override a property of its class, and this one asks the first parameter, which would say meta.
        ask: Any = own_device.fget
        namespace["device"] = property(lambda self: self.__dict__[_DEVICE] if _DEVICE in self.__dict__ else ask(self))

    namespace[_MAP] = property(_shown_map, _keep_map, _drop_map)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        found = plain.__reduce_ex__(self, protocol)
        # Copies have the same methods; pickles find the class again by the plain one.
        return (_empty, (plain, replaced), *found[2:]) if found[0] is copyreg.__newobj__ else found  # type: ignore[attr-defined]

    namespace["__reduce_ex__"] = reduce
    made: type[nn.Module] = type(plain)(plain.__name__, (plain,), namespace)
    return made


def _shown_map(model: nn.Module) -> dict[str, Any]:
    """The map as it was dispatched; within `execution_devices`, the devices that compute: libraries load adapters to the places in it."""
    if _MAP not in model.__dict__:
        raise AttributeError(f"{type(model).__name__} has no device map.")
    device_map: dict[str, Any] = model.__dict__[_MAP]
    if not shows_execution_devices():
        return device_map
    return {name: model.__dict__[_DEVICE] if place in ("cpu", "disk") else place for name, place in device_map.items()}


def _keep_map(model: nn.Module, device_map: dict[str, Any]) -> None:
    model.__dict__[_MAP] = device_map


def _drop_map(model: nn.Module) -> None:
    del model.__dict__[_MAP]


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _empty(plain: Any, replaced: frozenset[tuple[str, Any]]) -> nn.Module:
    made = _facade(plain, replaced)
    return made.__new__(made)


@dataclass(frozen=True, slots=True)
class _Mover:
    """`model.to(…)`, `model.cuda(…)` of a dispatched model."""

    method: str

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        function: Callable[..., nn.Module] = getattr(_plain(model), self.method)
        if self.method == "to":
            device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
            if device is None:
                return function(model, *args, **kwargs)
        logger.warning("You shouldn't move a model that is dispatched using bigmodel hooks.")
        offloaded = [name for name, parameter in model.named_parameters() if isinstance(parameter, LazyTensor)]
        if offloaded:
            raise DispatchError(
                "You can't move a model that has some modules offloaded to cpu or disk. "
                f"{len(offloaded)} parameters are offloaded ({offloaded[0]}, …): bigmodel.undispatch(model) first."
            )
        return function(model, *args, **kwargs)
