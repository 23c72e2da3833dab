"""4- and 8-bit weights."""

from __future__ import annotations

from ..dispatch import get_parameter_device
from ..quantization import BnbQuantizationConfig, has_4bit_bnb_layers
from ..quantization import keep_list as get_keys_to_not_convert
from ..quantize import get_quantized_model_device_map, load_and_quantize_model, quantize_and_offload_8bit, replace_with_bnb_layers

__all__ = [
    "BnbQuantizationConfig",
    "get_keys_to_not_convert",
    "get_parameter_device",
    "get_quantized_model_device_map",
    "has_4bit_bnb_layers",
    "load_and_quantize_model",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
]
