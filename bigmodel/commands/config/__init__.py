"""The config file of `bigmodel launch`: where it lies, and what it says."""

from __future__ import annotations

from ...training.config_file import DEFAULT_CONFIG_FILE as default_config_file
from ...training.config_file import read_launch_settings as load_config_from_file
from . import default as default

__all__ = ["default_config_file", "load_config_from_file"]
