"""Measures what this machine can do, in a few seconds, and keeps the figures for plans to come."""

from __future__ import annotations

from .profile import cache_folder, keep_machine, kept_machine, profile_file
from .survey import measure_machine

__all__ = ["cache_folder", "keep_machine", "kept_machine", "measure_machine", "profile_file"]
