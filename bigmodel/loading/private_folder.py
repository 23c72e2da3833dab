"""A temporary folder that goes when nothing uses it any more."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

__all__ = ["PrivateFolder"]


class PrivateFolder:
    """Removed with this object, at the end of the process at the latest."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="bigmodel-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
