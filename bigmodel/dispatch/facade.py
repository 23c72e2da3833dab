"""What a dispatched model shows to its callers: `to` and `cuda` that do not tear it apart, its `device`, where inputs go, and its map."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import torch
from torch import nn

from ..devices import accelerator_type
from ..errors import DispatchError
from .align import AlignDevicesHook
from .hooks import add_hook_to_module
from .lazy import LazyTensor

__all__ = ["put_on_facade", "show_device_map", "take_off_facade"]

logger = logging.getLogger("bigmodel.big_modeling")

_CLASS = "_bigmodel_plain_class"
_DEVICE = "_bigmodel_main_device"


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
    """Wraps the methods that would move the model, and makes `model.device` the main device where its class defines one."""
    for method in {"to", "cuda", accelerator_type() or "cuda"}:
        if hasattr(model, method) and method not in model.__dict__:
            model.__dict__[method] = functools.update_wrapper(functools.partial(_move, model, method), getattr(type(model), method))
    model.__dict__[_DEVICE] = main_device
    plain = type(model)
    if isinstance(getattr(plain, "device", None), property):
        # An instance cannot override a property of its class, and this one asks the first parameter, which would say meta.
        model.__class__ = _with_device(cast(Hashable, plain))


def take_off_facade(model: nn.Module) -> None:
    """Undoes `put_on_facade`."""
    for name in [name for name, value in model.__dict__.items() if isinstance(value, functools.partial) and value.func is _move]:
        del model.__dict__[name]
    model.__dict__.pop(_DEVICE, None)
    plain = type(model).__dict__.get(_CLASS)
    if plain is not None:
        model.__class__ = plain


@functools.cache
def _with_device(plain: Any) -> type[nn.Module]:
    """The same class, under the same name, whose `device` is the main device of the dispatched instance."""
    namespace = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "device": property(lambda self: self.__dict__[_DEVICE]),
        _CLASS: plain,
    }
    made: type[nn.Module] = type(plain)(plain.__name__, (plain,), namespace)
    return made


def _move(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> nn.Module:
    """`model.to(…)`, `model.cuda(…)` of a dispatched model."""
    function: Callable[..., nn.Module] = getattr(type(model), method)
    if method == "to":
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
