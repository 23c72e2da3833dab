"""Layers that multiply by one matrix, whichever way they keep it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["is_linear", "is_transposed", "matrix_shape", "plain_forward"]


def _conv1d() -> Any:
    """transformers' `Conv1D`, a linear layer that keeps its weight as (in, out). A model that has one has imported it."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())


def is_linear(module: object) -> bool:
    """Whether the module is an `nn.Linear` or a `Conv1D`, or of a class derived from one."""
    return isinstance(module, (nn.Linear, _conv1d()))


def is_transposed(module: nn.Module) -> bool:
    """Whether the layer keeps its weight as (in, out)."""
    return not isinstance(module, nn.Linear) and isinstance(module, _conv1d())


def plain_forward(module: nn.Module) -> bool:
    """Whether the layer computes what its base class computes."""
    base = _conv1d() if is_transposed(module) else nn.Linear
    return type(module).forward is base.forward


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (columns, rows) if is_transposed(module) else (rows, columns)
