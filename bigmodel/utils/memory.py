"""Memory given back, and the batch size that fits."""

from __future__ import annotations

from ..devices import clear_device_cache
from ..training.memory import find_executable_batch_size, release_memory, should_reduce_batch_size

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]
