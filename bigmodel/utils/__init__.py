"""The utility functions, under the path that scripts import. Each lives in its room; this only names them."""

from __future__ import annotations

from ..constants import (
    MODEL_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from ..devices import clear_device_cache
from ..dispatch import align_module_device, find_device, has_offloaded_params, is_namedtuple, send_to_device
from .modeling import *  # noqa: F403
from .modeling import __all__ as _modeling
from .offload import *  # noqa: F403
from .offload import __all__ as _offload

__all__ = [  # noqa: PLE0604, RUF100
    "MODEL_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "align_module_device",
    "clear_device_cache",
    "find_device",
    "has_offloaded_params",
    "is_namedtuple",
    "send_to_device",
    *_modeling,
    *_offload,
]
