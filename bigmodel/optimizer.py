"""The optimizer of the training side, under the path that scripts import."""

from __future__ import annotations

from .training.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
