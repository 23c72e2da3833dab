"""PyTorch/XLA."""

from __future__ import annotations

from ..training.xla import install_xla

__all__ = ["install_xla"]
