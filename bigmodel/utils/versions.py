"""Versions of packages, compared."""

from __future__ import annotations

from ..training.versions import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
