"""File names and numbers that several rooms share."""

from __future__ import annotations

from typing import Final

MODEL_NAME: Final = "pytorch_model"
WEIGHTS_NAME: Final = "pytorch_model.bin"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME: Final = "pytorch_model.bin.index.json"
SAFE_MODEL_NAME: Final = "model"
SAFE_WEIGHTS_NAME: Final = "model.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = "model.safetensors.index.json"
OFFLOAD_INDEX_NAME: Final = "index.json"

OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
RNG_STATE_NAME: Final = "random_states"

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB

RING_BYTES: Final = 64 * MiB
"""Upper bound of the staging memory that loading may hold beside what stays (bytes)."""

GROUP_ALIGNMENT_BYTES: Final = 64
"""Every tensor in a flat buffer starts at a multiple of this: a cache line, and enough for any dtype's vector loads."""
