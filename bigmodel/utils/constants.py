"""File names of checkpoints and training states, the layers that layerwise casting knows, and the words of sharding."""

from __future__ import annotations

from ..constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from ..dispatch import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from ..training.plugins.fsdp import SHARDING_STRATEGIES, WRAP_POLICIES

FSDP_AUTO_WRAP_POLICY = list(WRAP_POLICIES)
"""What `auto_wrap_policy` of `FullyShardedDataParallelPlugin` may be, in capitals."""

FSDP_SHARDING_STRATEGY = list(SHARDING_STRATEGIES)
"""What its `sharding_strategy` may be."""

__all__ = [
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_SHARDING_STRATEGY",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
]
