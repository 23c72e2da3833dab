"""Loggers of jobs of several processes, under the path that scripts import."""

from __future__ import annotations

from .training.logs import ProcessLogger as MultiProcessAdapter
from .training.logs import get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
