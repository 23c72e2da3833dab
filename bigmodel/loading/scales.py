"""8-bit (and MXFP4) checkpoints in floating models: each weight times its scales, as it is read.

A weight `w` in 8-bit floats or integers stands beside `w_scale` (compressed-tensors, fbgemm, ModelOpt) or `w_scale_inv` (DeepSeek; in spite
of its name it is multiplied with, too). A scale belongs to the whole tensor, to a row, or to a block of rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..protocols import TensorSpec
from .entry import Entry, Scaled
from .mxfp4 import BLOCKS_ENDING, SCALES_ENDING, joined_mxfp4

__all__ = ["ScaledEntries", "packed_form", "scaled_entries"]

SCALE_ENDINGS: Final = ("_scale_inv", "_scale")
FURTHER_ENDINGS: Final = ("_zero_point", "_scale_2", "_global_scale", "_g_idx", "_shape")
"""Of companions that mean more than a product: offsets, scales of scales, permuted columns, packed shapes."""
BLOCK: Final = 128
"""Rows and columns of DeepSeek's blocks, which the scales of other checkpoints of this kind have as well."""
WEIGHT_DTYPES: Final = frozenset(
    getattr(torch, name) for name in ("int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz") if hasattr(torch, name)
)
SCALE_DTYPES: Final = frozenset(
    getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu") if hasattr(torch, name)
)


@dataclass(frozen=True, slots=True)
class ScaledEntries:
    """The entries as a floating model sees them."""

    entries: Mapping[str, Entry]
    """Scaled weights are float32 entries; their scales are gone."""
    refused: Mapping[str, str]
    """Weights whose scales cannot be applied, and why."""


def scaled_entries(entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec], kept: Collection[str] = ()) -> ScaledEntries:
    """Joins weights with their scales, unless the scale is a tensor of the model, or one of those that are `kept` beside their weights.

    Where nothing is said to be kept and one of the targets holds 8-bit values itself, none are joined.
    """
    if not kept and any(spec.dtype in WEIGHT_DTYPES for spec in targets.values()):
        return ScaledEntries(entries, {})
    joined = dict(entries)
    refused = {}
    for name, entry in entries.items():
        if name.endswith(BLOCKS_ENDING) and name not in targets and name not in kept:
            scales = entries.get(name.removesuffix(BLOCKS_ENDING) + SCALES_ENDING)
            whole = None if scales is None else joined_mxfp4(entry, scales)
            if scales is not None and whole is not None and whole.name not in entries:
                joined[whole.name] = whole
                del joined[name], joined[scales.name]
                continue
        scale = next((entries[name + ending] for ending in SCALE_ENDINGS if name + ending in entries), None)
        if entry.dtype not in WEIGHT_DTYPES or entry.contents is not None or scale is None or scale.name in targets or scale.name in kept:
            continue
        further = next((name + ending for ending in FURTHER_ENDINGS if name + ending in entries), None)
        blocks = None if scale.contents is not None or scale.strides is not None else _blocks(entry.shape, scale)
        if further is not None:
            refused[name] = f"{further} stands beside it, which bigmodel does not apply"
        elif scale.dtype not in SCALE_DTYPES:
            refused[name] = f"its scale {scale.name} is of {scale.dtype}, not of floats"
        elif blocks is None:
            refused[name] = (
                f"its scale {scale.name} of shape {list(scale.shape)} does not tell which elements of {list(entry.shape)} it is for"
            )
        else:
            nbytes = math.prod(entry.shape) * entry.dtype.itemsize
            joined[name] = Entry(name, entry.file, 0, nbytes, torch.float32, entry.shape, contents=Scaled(entry, scale, blocks))
            del joined[scale.name]
    return ScaledEntries(joined, refused)


def _blocks(shape: tuple[int, ...], scale: Entry) -> tuple[int, ...] | None:
    """How many elements of each dimension share a scale; None where the shapes do not tell."""
    counts = scale.shape
    if math.prod(counts) == 1:
        return shape
    if len(counts) == len(shape) - 1 and counts == shape[:-1]:
        return (*(1 for _ in counts), shape[-1])  # one for each row
    if len(counts) != len(shape) or 0 in counts:
        return None
    even = [size // count if size % count == 0 else None for size, count in zip(shape, counts, strict=True)]
    usual = [
        each if count in (1, size) else BLOCK if -(-size // BLOCK) == count else None
        for size, count, each in zip(shape, counts, even, strict=True)
    ]
    found = [tuple(int(block or 0) for block in blocks) for blocks in (usual, even) if None not in blocks]
    # Where both would do and differ, the name tells: DeepSeek's blocks are always these.
    if not found or (len(set(found)) > 1 and not scale.name.endswith("_scale_inv")):
        return None
    return found[0]


def packed_form(name: str, available: Collection[str]) -> str | None:
    """The entry that holds a tensor of the model packed in a way that cannot be unpacked here; None where there is none such.

    Known by name: compressed-tensors (int4, NVFP4), MXFP4 that is not gpt-oss's, ModelOpt's NVFP4, GPTQ and AWQ.
    """
    if f"{name}_scale_2" in available:
        return name
    found = [f"{name}_packed", f"{name}{BLOCKS_ENDING}"]
    if name.endswith("weight"):
        found.append(f"{name.removesuffix('weight')}qweight")
    return next((each for each in found if each in available), None)
