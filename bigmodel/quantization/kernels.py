"""Packing and unpacking by bitsandbytes' kernels, in parts, so that a tensor of any size takes a few MiB of scratch memory.

Parts end where blocks end, so the result is bit for bit that of packing the whole. Importing this imports bitsandbytes, which takes
seconds: only what packs or computes does so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import bitsandbytes.functional as kernels
import torch
from torch.nn.functional import embedding as look_up

from .four_bit import BLOCK, STATISTICS_BLOCK, FourBit

__all__ = ["code_4bit", "nested_statistics", "pack_4bit", "pack_8bit", "state_4bit", "unpack_4bit", "unpack_8bit", "unpack_blocks_4bit"]

PART_ELEMENTS: Final = 1 << 17
"""What is packed at once on the CPU (a multiple of every block size): the kernels' scratch memory, about 30 bytes an element, stays in the
core's cache, and packing 4096 × 4096 bfloat16 takes 0.6 of the time of one call."""
KERNEL_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""What bitsandbytes' kernels pack from and unpack to."""


def pack_4bit(value: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed elements (uint8, two of them a byte), and the absmax (float32) of each block of 64."""
    flat = value.detach().reshape(-1)
    packed = torch.empty(-(-flat.numel() // 2), dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32, device=flat.device)
    step = PART_ELEMENTS if flat.device.type == "cpu" else max(1, flat.numel())
    for start in range(0, flat.numel(), step):
        values = flat[start : start + step]
        values = values if values.dtype in KERNEL_DTYPES else values.to(torch.float32)
        part, state = kernels.quantize_4bit(values, blocksize=BLOCK, quant_type=quant_type)
        packed[start // 2 : start // 2 + part.shape[0]] = part.view(-1)
        absmax[start // BLOCK : start // BLOCK + state.absmax.shape[0]] = state.absmax
    return packed, absmax


def nested_statistics(absmax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Double quantization: the absmax of the blocks in 8 bits, with their mean, the scales of 256 of them each, and the table of values."""
    offset = absmax.mean()
    packed, state = kernels.quantize_blockwise(absmax - offset, blocksize=STATISTICS_BLOCK)
    return {"absmax": packed, "nested_absmax": state.absmax, "nested_quant_map": state.code, "nested_offset": offset}


def code_4bit(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 values that the packed elements stand for (float32)."""
    code: torch.Tensor = kernels.get_4bit_type(quant_type, device=device)
    return code


def state_4bit(packing: FourBit, shape: tuple[int, ...], dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]) -> kernels.QuantState:
    """What bitsandbytes' kernels want to know about a packed weight: its companions, and what it was before."""
    state2 = None
    if packing.double_quant:
        state2 = kernels.QuantState(
            absmax=tensors["nested_absmax"], code=tensors["nested_quant_map"], blocksize=STATISTICS_BLOCK, dtype=torch.float32
        )
    return kernels.QuantState(
        absmax=tensors["absmax"],
        shape=torch.Size(shape),
        code=tensors["quant_map"],
        blocksize=BLOCK,
        quant_type=packing.quant_type,
        dtype=dtype if dtype in KERNEL_DTYPES else torch.float32,
        offset=tensors.get("nested_offset"),
        state2=state2,
    )


def unpack_4bit(packing: FourBit, tensors: Mapping[str, torch.Tensor], start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements `start … start + count` (flat) of a packed weight, of any floating dtype, without unpacking the others.

    The kernel is given them as one row: bitsandbytes' for the CPU takes blocks to begin anew with each row, which is wrong where rows do
    not end where blocks end.
    """
    computed = dtype if dtype in KERNEL_DTYPES else torch.float32
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    tensors = {name: tensor.view(-1) for name, tensor in tensors.items()}
    scales = tensors["absmax"][first:last]
    if packing.double_quant:
        low, high = first // STATISTICS_BLOCK, -(-last // STATISTICS_BLOCK)
        state = kernels.QuantState(
            absmax=tensors["nested_absmax"][low:high], code=tensors["nested_quant_map"], blocksize=STATISTICS_BLOCK, dtype=torch.float32
        )
        at = low * STATISTICS_BLOCK
        scales = kernels.dequantize_blockwise(tensors["absmax"][at : high * STATISTICS_BLOCK], state) + tensors["nested_offset"]
        scales = scales[first - at : last - at]
    skipped = start - first * BLOCK
    packed = tensors["weight"].view(torch.uint8)[first * BLOCK // 2 : -(-(start + count) // 2)]
    of_part = kernels.QuantState(
        absmax=scales,
        shape=torch.Size((skipped + count,)),
        code=tensors["quant_map"],
        blocksize=BLOCK,
        quant_type=packing.quant_type,
        dtype=computed,
    )
    values: torch.Tensor = kernels.dequantize_4bit(packed.view(-1, 1), of_part)
    return values.view(-1)[skipped:].to(dtype)


def unpack_blocks_4bit(
    packing: FourBit, tensors: Mapping[str, torch.Tensor], columns: int, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The rows `rows` (n, int64) of a table of `columns`, of any floating dtype: (n, columns). The packed tensors are `FourBit.table`'s.

    They are read as embeddings are, so that what rests elsewhere is read by rows. Raises IndexError for a row that there is not.
    """
    computed = dtype if dtype in KERNEL_DTYPES else torch.float32
    first = rows * columns // BLOCK
    of_row = 1 + (columns + BLOCK - 2) // BLOCK if columns % BLOCK else columns // BLOCK
    blocks = first.unsqueeze(1) + torch.arange(of_row, device=rows.device)
    blocks[:, 1:].clamp_(max=tensors["weight"].shape[0] - 1)  # a row that ends where a block ends does not need one more
    blocks = blocks.view(-1)
    scales = look_up(blocks, tensors["absmax"]).view(-1)
    if packing.double_quant:
        nested = look_up(blocks // STATISTICS_BLOCK, tensors["nested_absmax"]).view(-1)
        values = look_up(scales.int(), tensors["nested_quant_map"]).view(-1)
        scales = values * nested + look_up(torch.zeros(1, dtype=torch.int64, device=rows.device), tensors["nested_offset"]).view(())
    state = kernels.QuantState(
        absmax=scales,
        shape=torch.Size((blocks.numel() * BLOCK,)),
        code=look_up(torch.arange(16, device=rows.device), tensors["quant_map"]).view(-1),
        blocksize=BLOCK,
        quant_type=packing.quant_type,
        dtype=computed,
    )
    packed = look_up(blocks, tensors["weight"]).view(torch.uint8).view(-1, 1)
    unpacked: torch.Tensor = kernels.dequantize_4bit(packed, state).view(rows.numel(), of_row * BLOCK)
    if columns % BLOCK:
        places = (rows * columns - first * BLOCK).unsqueeze(1) + torch.arange(columns, device=rows.device)
        unpacked = unpacked.gather(1, places)
    return unpacked.to(dtype)


def pack_8bit(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a matrix in int8, and the largest magnitude of each (SCB, float32). Values pass through float16, as in bitsandbytes."""
    value = value.detach()
    packed = torch.empty(value.shape, dtype=torch.int8, device=value.device)
    scales = torch.empty(value.shape[0], dtype=torch.float32, device=value.device)
    step = max(1, PART_ELEMENTS // max(1, value.shape[1])) if value.device.type == "cpu" else max(1, value.shape[0])
    for start in range(0, value.shape[0], step):
        rows = value[start : start + step].to(torch.float16)
        packed[start : start + step], scales[start : start + step], _ = kernels.int8_vectorwise_quant(rows)
    return packed, scales


def unpack_8bit(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values (float32) that int8 rows and their scales stand for."""
    values: torch.Tensor = kernels.int8_vectorwise_dequant(packed, scales)
    return values
