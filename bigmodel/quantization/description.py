"""What bitsandbytes' checkpoints say about a 4-bit weight beside its tensors: a small JSON object, kept as a tensor of bytes.

The names are those of `bitsandbytes.functional.QuantState.as_dict(packed=True)`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import QuantizationError
from .four_bit import BLOCK, STATISTICS_BLOCK, FourBit

__all__ = ["DESCRIPTION", "STATE_NAMES", "Description", "described", "description_of"]

DESCRIPTION = "quant_state.bitsandbytes__"
"""Below the name of the weight, followed by the type (`nf4`, `fp4`): the name of the description in a state dict."""
STATE_NAMES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Companions that a state dict has below the name of the weight. The mean of the scales (`nested_offset`) is in the description."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a packed 4-bit weight was."""

    quant_type: str
    double_quant: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    nested_offset: float | None
    """The mean of the scales, with double quantization."""


def description_of(packing: FourBit, shape: tuple[int, ...], dtype: torch.dtype, nested_offset: float | None) -> torch.Tensor:
    """The description as bitsandbytes writes it (uint8)."""
    content: dict[str, Any] = {
        "quant_type": packing.quant_type,
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    if packing.double_quant:
        content |= {"nested_blocksize": STATISTICS_BLOCK, "nested_dtype": "float32", "nested_offset": nested_offset}
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def described(name: str, content: torch.Tensor) -> Description:
    """What the description of the weight `name` says. Raises `QuantizationError` for what bigmodel cannot compute with."""
    try:
        found: dict[str, Any] = json.loads(bytes(content.tolist()))
        dtype = getattr(torch, found["dtype"])
        nested = "nested_blocksize" in found
        sizes = (found["blocksize"], found["nested_blocksize"] if nested else STATISTICS_BLOCK)
        result = Description(found["quant_type"], nested, tuple(found["shape"]), dtype, float(found["nested_offset"]) if nested else None)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise QuantizationError(f"{name}: its description is not one of bitsandbytes ({type(error).__name__}: {error}).") from error
    if sizes != (BLOCK, STATISTICS_BLOCK) or result.quant_type not in ("nf4", "fp4"):
        raise QuantizationError(
            f"{name}: packed as {result.quant_type} in blocks of {sizes[0]} (scales in blocks of {sizes[1]}); this reads nf4 and fp4 in "
            f"blocks of {BLOCK} and {STATISTICS_BLOCK}."
        )
    return result
