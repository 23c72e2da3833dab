"""What a configuration of transformers says of a checkpoint that is quantized."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from ...errors import CheckpointError

__all__ = ["own_quantization"]

FP8_BLOCK: Final = [128, 128]
"""Rows and columns that share a scale."""
GPTQ_BITS: Final = (2, 4, 8)
GPTQ_FORMATS: Final = (None, "gptq", "gptq_v2")
SCALED_ACTIVATIONS: Final = ("bloom", "falcon", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "RefinedWebModel", "starcoder2")
"""Model types of which AWQ's checkpoints change more than the weights of linear layers."""


def own_quantization(path_or_id: str | os.PathLike[str], config: Any) -> Any:
    """What the configuration says of a checkpoint that bitsandbytes packed; None where it is not packed. Raises `CheckpointError` for other
    libraries'.

    From one that is loaded as the floats that it stands for (see `FLOATING`) what it says is taken away: the model is a floating one.
    """
    for part in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        for attribute in ("quantization_config", "compression_config"):
            quantization = getattr(part, attribute, None)
            if not quantization:
                continue
            described = quantization if isinstance(quantization, dict) else getattr(quantization, "__dict__", {})
            method = described.get("quant_method", "unknown method")
            method = str(getattr(method, "value", method))
            if part is config and method == "bitsandbytes":
                return quantization
            if part is config and method in FLOATING and FLOATING[method](described, getattr(config, "model_type", None)):
                delattr(config, attribute)
                return None
            raise CheckpointError(
                f"{os.fspath(path_or_id)} is quantized (its {attribute} says {method}). Of quantized checkpoints of transformers, bigmodel "
                "reads those of bitsandbytes, and as floats those of 8-bit floats in blocks of 128, gpt-oss's own, GPTQ's of 2, 4 and 8 "
                "bits, AWQ's (gemm), and 4-bit integers of compressed-tensors (pack-quantized): load the model's unquantized checkpoint."
            )
    return None


def _is_block_fp8(described: Mapping[str, Any], model_type: str | None) -> bool:
    return described.get("weight_block_size") in (None, FP8_BLOCK, tuple(FP8_BLOCK))


def _is_own_mxfp4(described: Mapping[str, Any], model_type: str | None) -> bool:
    return model_type == "gpt_oss"


def _is_plain_gptq(described: Mapping[str, Any], model_type: str | None) -> bool:
    is_known = described.get("bits") in GPTQ_BITS and described.get("checkpoint_format") in GPTQ_FORMATS
    return is_known and not described.get("is_marlin_format")


def _is_plain_awq(described: Mapping[str, Any], model_type: str | None) -> bool:
    version = str(described.get("version", "gemm")).lower()
    return described.get("bits") == 4 and version == "gemm" and model_type not in SCALED_ACTIVATIONS


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_packed_int4(described: Mapping[str, Any], model_type: str | None) -> bool:
    groups = [_mapping(group) for group in _mapping(described.get("config_groups")).values()]
    weights = [_mapping(group.get("weights")) for group in groups]
    formats = [group.get("format") or described.get("format") for group in groups]
    sparsity = _mapping(described.get("sparsity_config")).get("format", "dense")
    is_int4 = all(each.get("num_bits") == 4 and each.get("type", "int") == "int" for each in weights)
    is_packed = bool(formats) and all(each == "pack-quantized" for each in formats)
    return is_packed and is_int4 and sparsity == "dense" and not described.get("transform_config")


FLOATING: Final[Mapping[str, Callable[[Mapping[str, Any], str | None], bool]]] = {
    "fp8": _is_block_fp8,
    "mxfp4": _is_own_mxfp4,
    "gptq": _is_plain_gptq,
    "awq": _is_plain_awq,
    "compressed-tensors": _is_packed_int4,
}
"""Methods whose packed weights are loaded as floats, and whether a checkpoint of one can be, by its description and the model's type."""
