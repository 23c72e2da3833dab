"""Placeholders: parameters of the right shape and dtype whose values rest elsewhere, and come when anything reads them."""

from __future__ import annotations

from typing import Any

import torch

from .functions import fill_tables
from .lazy import LazyTensor
from .origin import Origin

__all__ = ["Placeholder"]


class _PlaceholderType(torch._C._TensorMeta):
    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is LazyTensor and instance._is_param


class Placeholder(LazyTensor, metaclass=_PlaceholderType):
    """The parameter that stands for an offloaded weight between forwards: a `LazyTensor` that is an `nn.Parameter` too."""

    @classmethod
    def of(cls, origin: Origin, requires_grad: bool = False, *, stand_in: torch.Tensor | None = None) -> Any:
        """The parameter that stands for what rests at `origin`."""
        return LazyTensor._make(origin, requires_grad, stand_in, is_parameter=True)


fill_tables()
