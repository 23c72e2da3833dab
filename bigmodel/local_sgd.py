"""Local SGD, under the path that scripts import."""

from __future__ import annotations

from .training.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
