"""Import paths that scripts use for what the command line does."""

from __future__ import annotations

from . import config as config
