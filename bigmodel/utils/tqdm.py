"""Progress bars of several processes."""

from __future__ import annotations

from ..training.logs import tqdm

__all__ = ["tqdm"]
