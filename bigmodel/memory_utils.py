"""The batch size that fits, under the path that old scripts import."""

from __future__ import annotations

from .utils.memory import *  # noqa: F403
from .utils.memory import __all__ as __all__
