"""Placeholders: parameters of the right shape and dtype whose values rest elsewhere, and come when anything reads them."""

from __future__ import annotations

from torch import nn

from .functions import fill_tables
from .lazy import LazyTensor

__all__ = ["Placeholder"]


class Placeholder(LazyTensor, nn.Parameter):
    """The parameter that stands for an offloaded weight between forwards."""


fill_tables()
