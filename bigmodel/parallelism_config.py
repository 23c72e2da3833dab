"""How processes divide a job, under the path that scripts import."""

from __future__ import annotations

from .training.parallelism import ParallelismConfig

__all__ = ["ParallelismConfig"]
