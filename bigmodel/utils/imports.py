"""Whether a package is installed, and what the accelerators are."""

from __future__ import annotations

from ..training.available import *  # noqa: F403
from ..training.available import __all__ as __all__
