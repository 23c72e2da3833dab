"""The Accelerator, under the path that scripts import."""

from __future__ import annotations

from .training.accelerator import Accelerator

__all__ = ["Accelerator"]
