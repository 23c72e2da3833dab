"""Putting new tensors into a model so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..modules import owner_of
from ..protocols import Offloaded, Store, TensorSpec

__all__ = ["Replacement", "new_parameter"]


def new_parameter(old: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter of the same class and attributes as `old`, with other data. Integers never ask for gradients."""
    requires_grad = old.requires_grad and (data.is_floating_point() or data.is_complex())
    parameter: nn.Parameter = torch.Tensor._make_subclass(type(old), data.detach(), requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _registered(module: nn.Module, attribute: str) -> Any:
    return module._parameters.get(attribute, module._buffers.get(attribute))


class Replacement:
    """Replaces tensors of a model; leaving the block with an error (Ctrl-C too) puts all of them back."""

    def __init__(self, model: nn.Module, *, makes_plain: bool = False) -> None:
        """`makes_plain`: tensors that rest elsewhere give way to plain ones; otherwise they go on to rest, with new bytes."""
        self._model = model
        self._makes_plain = makes_plain
        self._undo_resting: list[Callable[[], None]] = []
        self._undo: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._undo_data: list[tuple[nn.Parameter, torch.Tensor]] = []

    def put(self, names: list[str], data: torch.Tensor) -> None:
        """Gives the tensor registered under all of `names` new data.

        A parameter that keeps its device and dtype stays the object that optimizers know; otherwise all names get one new object.
        """
        module, attribute = owner_of(self._model, names[0])
        registered = _registered(module, attribute)
        if isinstance(registered, Offloaded):
            if self._makes_plain:
                self.put_object(names, registered.plain(data))
            else:
                self._undo_resting.append(registered.way_back())
                registered.rest_in_memory(data)
            return
        old = module._parameters.get(attribute)
        if old is not None and old.device.type == data.device.type == "meta" and old.dtype == data.dtype:
            return
        if old is not None and (old.device, old.dtype) == (data.device, data.dtype):
            self._undo_data.append((old, old.data))
            old.data = data
            return
        self.put_object(names, data if old is None else new_parameter(old, data))

    def put_at_rest(self, names: list[str], spec: TensorSpec, store: Store, key: str) -> None:
        """The tensor registered under all of `names` rests in `store` as `key`: on meta, or offloaded like before."""
        registered = _registered(*owner_of(self._model, names[0]))
        if isinstance(registered, Offloaded) and not self._makes_plain:
            self._undo_resting.append(registered.way_back())
            registered.rest_in(store, key)
        else:
            self.put(names, torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    def put_object(self, names: list[str], new: torch.Tensor) -> None:
        """Registers `new` itself under all of `names`."""
        for name in names:
            module, attribute = owner_of(self._model, name)
            table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
            self._undo.append((table, attribute, table[attribute]))
            table[attribute] = new

    def undo(self) -> None:
        """Puts everything back."""
        for table, attribute, before in reversed(self._undo):
            table[attribute] = before
        for parameter, data in reversed(self._undo_data):
            parameter.data = data
        for way_back in reversed(self._undo_resting):
            way_back()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.undo()
