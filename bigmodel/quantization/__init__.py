"""Packed weights: formats and their exact sizes, which layers are packed, packing and unpacking."""

from __future__ import annotations

from .config import BnbQuantizationConfig, Scheme, scheme_of
from .formats import FORMAT_NAMES, FourBit, Int8, PackedFormat, weight_format
from .packer import WeightPacker
from .replacement import has_4bit_bnb_layers, install, pack, packed_layers, replace_with_bnb_layers
from .selection import Selection, keep_list, select

__all__ = [
    "FORMAT_NAMES",
    "BnbQuantizationConfig",
    "FourBit",
    "Int8",
    "PackedFormat",
    "Scheme",
    "Selection",
    "WeightPacker",
    "has_4bit_bnb_layers",
    "install",
    "keep_list",
    "pack",
    "packed_layers",
    "replace_with_bnb_layers",
    "scheme_of",
    "select",
    "weight_format",
]
