"""Nested structures of tensors: where they are, and moving them."""

from __future__ import annotations

from ..dispatch import find_device, is_namedtuple, send_to_device

__all__ = ["find_device", "is_namedtuple", "send_to_device"]
