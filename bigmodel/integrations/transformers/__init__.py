"""Models of the library transformers: built from their configuration, filled through transformers' own table of names.

Importing this needs no transformers; calling anything does (`MissingPackageError` says how to install it).
"""

from __future__ import annotations

from .empty import empty_model
from .keys import TransformersKeys
from .pretrained import from_pretrained

__all__ = ["TransformersKeys", "empty_model", "from_pretrained"]
