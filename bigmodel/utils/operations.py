"""Nested structures of tensors: where they are, moving them, and the same within and across processes."""

from __future__ import annotations

from ..dispatch import find_device, send_to_device
from ..errors import DistributedOperationException
from ..structures import is_namedtuple
from ..training import collectives, nested
from ..training.collectives import *  # noqa: F403
from ..training.nested import *  # noqa: F403
from ..training.plugins.deepspeed_gathering import GatheredParameters
from ..training.reduction import reduce

__all__ = [  # noqa: PLE0604, RUF100
    "DistributedOperationException",
    "GatheredParameters",
    "find_device",
    "is_namedtuple",
    "reduce",
    "send_to_device",
    *collectives.__all__,
    *nested.__all__,
]
