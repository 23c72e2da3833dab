"""Models of the library transformers: built from their configuration, filled through transformers' own table of names.

Importing this needs no transformers; calling anything does (`MissingPackageError` says how to install it).
"""

from __future__ import annotations

from .deepspeed import announce_deepspeed
from .empty import build_empty, empty_model, is_config, load_config, resolve_dtype
from .gguf import is_gguf, local_header, single_gguf
from .hub import config_folder, resolve
from .keys import TransformersKeys
from .pretrained import from_pretrained
from .quantized import own_quantization

__all__ = [
    "TransformersKeys",
    "announce_deepspeed",
    "build_empty",
    "config_folder",
    "empty_model",
    "from_pretrained",
    "is_config",
    "is_gguf",
    "load_config",
    "local_header",
    "own_quantization",
    "resolve",
    "resolve_dtype",
    "single_gguf",
]
