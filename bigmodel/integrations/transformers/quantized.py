"""What a configuration of transformers says of a checkpoint that is quantized."""

from __future__ import annotations

import os
from typing import Any, Final

from ...errors import CheckpointError

__all__ = ["own_quantization"]

FP8_BLOCK: Final = [128, 128]
"""Rows and columns that share a scale."""


def own_quantization(path_or_id: str | os.PathLike[str], config: Any) -> Any:
    """What the configuration says of a checkpoint that bitsandbytes packed; None where it is not packed. Raises `CheckpointError` for other
    libraries'.

    From one of 8-bit floats (DeepSeek's) or 4-bit floats (gpt-oss's) what it says is taken away: the model is a floating one, and what
    loads it makes the values of the packed ones.
    """
    for part in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        for attribute in ("quantization_config", "compression_config"):
            quantization = getattr(part, attribute, None)
            if not quantization:
                continue
            described = quantization if isinstance(quantization, dict) else vars(quantization)
            method = described.get("quant_method", "unknown method")
            method = getattr(method, "value", method)
            if part is config and method == "bitsandbytes":
                return quantization
            is_fp8 = method == "fp8" and described.get("weight_block_size") in (None, FP8_BLOCK, tuple(FP8_BLOCK))
            if part is config and (is_fp8 or (method == "mxfp4" and getattr(config, "model_type", None) == "gpt_oss")):
                delattr(config, attribute)
                return None
            raise CheckpointError(
                f"{os.fspath(path_or_id)} is quantized (its {attribute} says {method}). Of quantized checkpoints of transformers, bigmodel "
                "reads those of bitsandbytes, of 8-bit floats in blocks of 128, and gpt-oss's own: load the model's unquantized checkpoint."
            )
    return None
