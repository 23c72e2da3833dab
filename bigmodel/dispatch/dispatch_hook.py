"""The hook that `dispatch` adds: it also picks up modules and parameters that are put into a dispatched model later on."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..errors import DispatchError
from .align import AlignDevicesHook, as_torch_device, move_tensors
from .hooks import add_hook_to_module, find_hook
from .lazy import LazyTensor

__all__ = ["DispatchHook"]

_watched: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DispatchHook]] = weakref.WeakKeyDictionary()
"""The modules of dispatched models, with the hook that will look after what is put into them."""

_watching = threading.Lock()
_handles: list[Any] = []


class DispatchHook(AlignDevicesHook):
    """An `AlignDevicesHook` that knows of everything put below its module after the dispatch (adapters, replaced layers and parameters).

    Before the next forward the newcomers' tensors are brought to the execution device, where they stay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watches = False
        self._newcomers: list[_Newcomer] = []

    # Libraries build hooks anew from those attributes that the constructor's signature names.
    __init__.__wrapped__ = AlignDevicesHook.__init__  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignDevicesHook:
        made = super().__deepcopy__(memo)
        assert isinstance(made, DispatchHook)
        made._watches = False
        made._newcomers = []
        return made

    def _look_after(self, module: nn.Module) -> None:
        if not self._watches:
            self.watch(module)
        if self._newcomers:
            self._receive(module)

    def watch(self, module: nn.Module) -> None:
        """Begins to look after `module` and all below it that has no such hook of its own."""
        self._watches = True
        with _watching:
            if not _handles:
                _handles.append(register_module_module_registration_hook(_module_registered))
                _handles.append(register_module_parameter_registration_hook(_tensor_registered))
                _handles.append(register_module_buffer_registration_hook(_tensor_registered))
        _watch_below(module, self, is_top=True)

    def _receive(self, module: nn.Module) -> None:
        newcomers, self._newcomers = self._newcomers, []
        device = as_torch_device(self.execution_device)
        names = {id(part): name for name, part in module.named_modules(remove_duplicate=False)}
        for newcomer in newcomers:
            parent = newcomer.parent()
            if parent is None or id(parent) not in names:
                continue
            child = parent._modules.get(newcomer.name)
            place = ".".join(part for part in (names[id(parent)], newcomer.name if child is not None else "") if part)
            if child is None:
                _refuse_meta(parent, place, recurse=False)
                move_tensors(parent, device, recurse=False)
                continue
            target = newcomer.replaces.execution_device if newcomer.replaces is not None else device
            _refuse_meta(child, place, recurse=True)
            move_tensors(child, as_torch_device(target), recurse=True)
            if newcomer.replaces is not None and find_hook(child, AlignDevicesHook) is None:
                hook = DispatchHook(target, io_same_device=newcomer.replaces.io_same_device, skip_keys=newcomer.replaces.skip_keys)
                add_hook_to_module(child, hook, append=True)


class _Newcomer:
    """Something registered under `name` of `parent`, perhaps in the place of a module with a hook."""

    def __init__(self, parent: nn.Module, name: str, replaces: AlignDevicesHook | None) -> None:
        self.parent = weakref.ref(parent)
        self.name = name
        self.replaces = replaces


def _watch_below(module: nn.Module, hook: DispatchHook, *, is_top: bool) -> None:
    if not is_top and find_hook(module, DispatchHook) is not None:
        return
    _watched[module] = weakref.ref(hook)
    for child in module.children():
        _watch_below(child, hook, is_top=False)


def _hook_of(module: nn.Module) -> DispatchHook | None:
    known = _watched.get(module)
    return None if known is None else known()


def _module_registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    hook = _hook_of(parent)
    if hook is None or child is None:
        return
    before = parent._modules.get(name)
    hook._newcomers.append(_Newcomer(parent, name, None if before is None else find_hook(before, DispatchHook)))
    _watch_below(child, hook, is_top=False)


def _tensor_registered(parent: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    hook = _hook_of(parent)
    if hook is not None and tensor is not None and not isinstance(tensor, LazyTensor):
        hook._newcomers.append(_Newcomer(parent, name, None))


def _refuse_meta(module: nn.Module, place: str, *, recurse: bool) -> None:
    for name, tensor in module.named_parameters(recurse=recurse):
        if tensor.device.type == "meta" and not isinstance(tensor, LazyTensor):
            raise DispatchError(
                f"{place}.{name} was put into the dispatched model on meta, without values: give it values, or dispatch again with a store."
                " Code that puts adapters beside offloaded weights, on the device that these answer, goes into `with "
                "bigmodel.execution_devices():`."
            )
