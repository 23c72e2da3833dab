"""Several steps on a model that are done all, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .interrupts import uninterrupted
from .modules import distinct_modules
from .protocols import Offloaded

__all__ = ["unchanged_on_error"]

TABLES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Within the block, an error (Ctrl-C too) leaves the model as it was: its modules, what they hold, and what their tensors stand for.

    Values that were changed in place are not put back. Data that parameters have lost are kept until the end of the block.
    """
    modules = [_remembered(module) for module in distinct_modules(model)]
    tensors = [way_back for tensor in (*model.parameters(), *model.buffers()) if (way_back := _way_back(tensor)) is not None]
    try:
        yield
    except BaseException:
        with uninterrupted():
            _put_back(modules, tensors)
        raise


def _put_back(
    modules: Iterable[tuple[nn.Module, type[nn.Module], dict[str, Any], dict[str, dict[str, Any]]]], tensors: Iterable[Callable[[], None]]
) -> None:
    for module, its_class, attributes, tables in modules:
        module.__class__ = its_class
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for name, content in tables.items():
            # The very tables that others refer to: what brings weights puts them in there.
            table = attributes[name]
            table.clear()
            table.update(content)
    for way_back in tensors:
        way_back()


def _remembered(module: nn.Module) -> tuple[nn.Module, type[nn.Module], dict[str, Any], dict[str, dict[str, Any]]]:
    return (
        module,
        type(module),
        dict(module.__dict__),
        {name: dict(table) for name in TABLES if isinstance(table := module.__dict__.get(name), dict)},
    )


def _way_back(tensor: Any) -> Callable[[], None] | None:
    if isinstance(tensor, Offloaded):
        return tensor.way_back()
    if not isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return None
    data = tensor.data

    def put_back() -> None:
        if not _is_same(tensor, data):
            tensor.data = data

    return put_back


def _is_same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return tensor.device == data.device and tensor.dtype == data.dtype and tensor.data_ptr() == data.data_ptr()
