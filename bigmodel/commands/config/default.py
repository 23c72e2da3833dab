"""A config file for this machine."""

from __future__ import annotations

from ...training.config_file import write_basic_config

__all__ = ["write_basic_config"]
