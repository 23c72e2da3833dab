"""8-bit checkpoints, and others that are packed, in floating models: the values that they stand for, made as they are read.

A weight `w` in 8-bit floats or integers stands beside `w_scale` (compressed-tensors, fbgemm, ModelOpt) or `w_scale_inv` (DeepSeek; in spite
of its name it is multiplied with, too). A scale belongs to the whole tensor, to a row, or to a block of rows and columns. To read another
way of packing, write a file with a function like those in `JOINS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError
from ..protocols import TensorSpec
from .awq import join_awq
from .contradiction import OTHERS, described_blocks
from .entry import Dequantized, Entry, Scaled
from .gptq import join_gptq
from .mxfp4 import BLOCKS_ENDING, join_mxfp4
from .pack_quantized import join_pack_quantized, promised

__all__ = ["ScaledEntries", "packed_form", "scaled_entries"]

JOINS: Final[tuple[Callable[[str, Mapping[str, Entry]], tuple[Entry, list[str]] | None], ...]] = (
    join_mxfp4,
    join_pack_quantized,
    join_gptq,
    join_awq,
)
"""Each says, for the name of an entry that holds packed values, which entry it makes with others, and the names of all of these."""
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

    Where nothing is said to be kept and one of the targets holds 8-bit values itself, none are joined. Raises `CheckpointError` where a
    configuration beside a file says that its weights are packed in another way than they are.
    """
    if not kept and any(spec.dtype in WEIGHT_DTYPES for spec in targets.values()):
        return ScaledEntries(entries, {})
    joined = dict(entries)
    parts_of: dict[str, list[str]] = {}
    refused = {}
    for name, entry in entries.items():
        packed = None if name in targets or name in kept else next((found for join in JOINS if (found := join(name, entries))), None)
        if packed is not None and packed[0].name not in entries:
            whole, names = packed
            if whole.name in parts_of:  # which of the two is meant is not known: neither fills a tensor
                joined.pop(whole.name, None)
                joined |= {each: entries[each] for each in parts_of[whole.name]}
                continue
            parts_of[whole.name] = names
            joined[whole.name] = whole
            for each in names:
                joined.pop(each, None)
            continue
        scale = next((entries[name + ending] for ending in SCALE_ENDINGS if name + ending in entries), None)
        if entry.dtype not in WEIGHT_DTYPES or entry.contents is not None or scale is None or scale.name in targets:
            continue
        told = _told_blocks(entry, scale)
        if scale.name in kept:
            continue
        further = next((name + ending for ending in FURTHER_ENDINGS if name + ending in entries), None)
        blocks = None if scale.contents is not None or scale.strides is not None else told or _blocks(entry.shape, scale)
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


def _told_blocks(weight: Entry, scale: Entry) -> tuple[int, ...] | None:
    """How many elements of each dimension share a scale, where a configuration beside the file says it of matrices.

    Raises `CheckpointError` where the scales are for others.
    """
    found = described_blocks(weight)
    if found is None or len(weight.shape) < 2 or not weight.dtype.is_floating_point:
        return None
    config, blocks = found
    counts = tuple(-(-size // block) for size, block in zip(weight.shape[-2:], blocks, strict=True))
    if scale.shape != (*weight.shape[:-2], *counts):
        raise CheckpointError(
            f"{config}: says that blocks of {list(blocks)} share a scale, of which {weight.name!r} of shape {list(weight.shape)} in "
            f"{weight.file.name} has {list(counts)} a matrix, but {scale.name!r} has the shape {list(scale.shape)}. {OTHERS}"
        )
    return (*(1 for _ in weight.shape[:-2]), *blocks)


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


def packed_form(name: str, entries: Mapping[str, Entry]) -> str | None:
    """How a tensor of the model is packed, for messages where it could not be filled; None where nothing speaks of that.

    Known by name: compressed-tensors, MXFP4 that is not gpt-oss's, NVFP4, GPTQ and AWQ.
    """
    entry = entries.get(name)
    if entry is not None and isinstance(entry.contents, Dequantized):
        return f"{entry.contents.told}, which would be of this shape"
    layer = name.removesuffix("weight")
    twice = [each for each in (f"{name}_packed", f"{name}{BLOCKS_ENDING}", f"{layer}qweight") if each in entries]
    if len(twice) > 1:
        return f"it is packed in several ways, {' and '.join(twice)}, of which one is left over: delete that from the checkpoint"
    kinds = {
        f"{name}_scale_2": (name, "NVFP4 of ModelOpt"),
        f"{name}_global_scale": (name if entry is not None else f"{name}_packed", "NVFP4"),
        f"{name}_packed": (f"{name}_packed", "another format of compressed-tensors than 4-bit integers"),
        f"{name}{BLOCKS_ENDING}": (f"{name}{BLOCKS_ENDING}", "MXFP4 in an order of its own"),
        f"{layer}qweight": (f"{layer}qweight", "GPTQ or AWQ of a kind of its own"),
    }
    found = next((kind for companion, kind in kinds.items() if companion in entries), None)
    if found is None and entry is not None and "float4" in str(entry.dtype):
        found = name, "pairs of 4-bit floats, as NVFP4"
    if found is None:
        return None
    companions = _companions(found[0], entries)
    lost = next((each for each in companions if each not in entries), None)
    if lost is not None:
        return f"{found[0]} is packed, but {lost}, which belongs to it, is not in the checkpoint: get the checkpoint again, all its files"
    parts = [entries[each] for each in ([found[0], *companions] if companions else ())]
    shapes = ", ".join(f"{part.name.rpartition('.')[2]} {list(part.shape)} {str(part.dtype).removeprefix('torch.')}" for part in parts)
    told = f" ({shapes})" if shapes else ""
    return f"{found[0]} is packed in a way that bigmodel does not read, {found[1]}{told}: load the unquantized checkpoint"


def _companions(packed: str, entries: Mapping[str, Entry]) -> list[str]:
    """The tensors without which integers of GPTQ, AWQ and compressed-tensors have no values."""
    if packed.endswith("qweight"):
        return [packed.removesuffix("qweight") + each for each in ("scales", "qzeros")]
    weight = packed.removesuffix("_packed")
    if weight == packed or f"{weight}_global_scale" in entries:
        return []
    return [weight + each for each in ("_scale", "_shape", *promised(entries[packed]))]
