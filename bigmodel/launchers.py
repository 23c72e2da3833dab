"""Processes started from a notebook or a test, under the path that scripts import."""

from __future__ import annotations

from .training.launchers import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
