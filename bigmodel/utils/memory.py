"""Memory of the accelerators."""

from __future__ import annotations

from ..devices import clear_device_cache

__all__ = ["clear_device_cache"]
