"""The scheduler of the training side, under the path that scripts import."""

from __future__ import annotations

from .training.scheduler import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
