"""Packed weights: formats and their exact sizes, which layers are packed, packing and unpacking."""

from __future__ import annotations

from .config import BnbQuantizationConfig, Scheme, scheme_of, transformers_config
from .description import Description, described
from .formats import FORMAT_NAMES, FourBit, Int8, PackedFormat, weight_format
from .matrices import is_linear, matrix_shape, plain_forward
from .packer import WeightPacker
from .replacement import Places, has_4bit_bnb_layers, install, pack, packed_layers, replace_with_bnb_layers
from .report import LayerReport, QuantizationReport, is_stack, note_scheme, report
from .selection import Selection, keep_list, select
from .stored import StoredWeight, stored_weights

__all__ = [
    "FORMAT_NAMES",
    "BnbQuantizationConfig",
    "Description",
    "FourBit",
    "Int8",
    "LayerReport",
    "PackedFormat",
    "Places",
    "QuantizationReport",
    "Scheme",
    "Selection",
    "StoredWeight",
    "WeightPacker",
    "described",
    "has_4bit_bnb_layers",
    "install",
    "is_linear",
    "is_stack",
    "keep_list",
    "matrix_shape",
    "note_scheme",
    "pack",
    "packed_layers",
    "plain_forward",
    "replace_with_bnb_layers",
    "report",
    "scheme_of",
    "select",
    "stored_weights",
    "transformers_config",
    "weight_format",
]
