"""Putting new tensors into a model so that it can be undone."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..modules import owner_of

__all__ = ["Replacement", "new_parameter"]


def new_parameter(old: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter of the same class and attributes as `old`, with other data. Integers never ask for gradients."""
    requires_grad = old.requires_grad and (data.is_floating_point() or data.is_complex())
    parameter: nn.Parameter = torch.Tensor._make_subclass(type(old), data.detach(), requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


class Replacement:
    """Replaces tensors of a model; leaving the block with an error (Ctrl-C too) puts all of them back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._undo_data: list[tuple[nn.Parameter, torch.Tensor]] = []

    def put(self, names: list[str], data: torch.Tensor) -> None:
        """Gives the tensor registered under all of `names` new data.

        A parameter that keeps its device and dtype stays the object that optimizers know; otherwise all names get one new object.
        """
        module, attribute = owner_of(self._model, names[0])
        old = module._parameters.get(attribute)
        if old is not None and old.device.type == data.device.type == "meta" and old.dtype == data.dtype:
            return
        if old is not None and (old.device, old.dtype) == (data.device, data.dtype):
            self._undo_data.append((old, old.data))
            old.data = data
            return
        self.put_object(names, data if old is None else new_parameter(old, data))

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

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None:
            self.undo()
