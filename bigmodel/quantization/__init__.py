"""Packed weights: formats and their exact sizes, which layers are packed, packing and unpacking."""

from __future__ import annotations

from .config import BnbQuantizationConfig, Scheme, scheme_of, transformers_config
from .description import Description, described
from .formats import FORMAT_NAMES, weight_format
from .four_bit import FourBit
from .int8 import Int8
from .matrices import is_linear, matrix_shape, plain_forward
from .packed_embedding import PackedEmbedding, packed_table
from .packed_format import PackedFormat, chosen_by
from .packed_linear import PackedLinear, packed_layer
from .packed_stack import PackedStack, attach
from .packed_weight import PackedWeight
from .packer import WeightPacker
from .replacement import (
    Places,
    has_4bit_bnb_layers,
    has_packed_stacks,
    install,
    pack,
    packed_layers,
    replace_with_bnb_layers,
    run_by_index,
    unknown_to_transformers,
)
from .report import LayerReport, QuantizationReport, key_rules, note_bits, note_key_rules, note_scheme, report
from .selection import Selection, keep_list, select
from .stacks import is_stack, stacks_of, why_left
from .stored import StoredWeight, stored_weights

__all__ = [
    "FORMAT_NAMES",
    "BnbQuantizationConfig",
    "Description",
    "FourBit",
    "Int8",
    "LayerReport",
    "PackedEmbedding",
    "PackedFormat",
    "PackedLinear",
    "PackedStack",
    "PackedWeight",
    "Places",
    "QuantizationReport",
    "Scheme",
    "Selection",
    "StoredWeight",
    "WeightPacker",
    "attach",
    "chosen_by",
    "described",
    "has_4bit_bnb_layers",
    "has_packed_stacks",
    "install",
    "is_linear",
    "is_stack",
    "keep_list",
    "key_rules",
    "matrix_shape",
    "note_bits",
    "note_key_rules",
    "note_scheme",
    "pack",
    "packed_layer",
    "packed_layers",
    "packed_table",
    "plain_forward",
    "replace_with_bnb_layers",
    "report",
    "run_by_index",
    "scheme_of",
    "select",
    "stacks_of",
    "stored_weights",
    "transformers_config",
    "unknown_to_transformers",
    "weight_format",
    "why_left",
]
