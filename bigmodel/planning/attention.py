"""What scaled dot product attention allocates on the device that it will run on, told by shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["AttentionAs"]

MATH = 0
"""`torch.nn.attention.SDPBackend.MATH`: the scores of all pairs of tokens are written out."""


class AttentionAs(TorchFunctionMode):
    """Within a with block, attention of meta tensors allocates what it would on `device`.

    The device is asked which kernel it would take for tensors of these shapes. None is an accelerator that is not here: it has fused
    kernels for all of them.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        is_fused = self._is_fused(query, key, value, attn_mask, dropout_p, is_causal, options)
        additive = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            additive = attn_mask.new_empty(attn_mask.shape, dtype=query.dtype)
        if not is_fused:
            attended: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, additive, dropout_p, is_causal, **options
            )[0]
            return attended
        *lead, heads, rows, _ = query.shape
        tiles = query.new_empty(_tile_bytes(rows, key.shape[-2], query), dtype=torch.uint8)
        found = query.new_empty(*lead, rows, heads, value.shape[-1]).transpose(-3, -2)
        sums = query.new_empty(*lead, heads, rows, dtype=torch.float32)
        del additive, tiles, sums
        return found

    def _is_fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        options: Mapping[str, Any],
    ) -> bool:
        if self.device is None:
            return True
        if query.dim() != 4:
            return False

        def there(tensor: torch.Tensor) -> torch.Tensor:
            """A tensor of this shape on the device, all rows in the memory of one."""
            return torch.empty(tensor.shape[-1:], dtype=tensor.dtype, device=self.device).expand(tensor.shape)

        with torch._C._DisableTorchDispatch():  # these are real and not part of what is recorded
            choose: Any = torch._fused_sdp_choice
            masked = None if mask is None else there(mask)
            return bool(choose(there(query), there(key), there(value), masked, dropout, causal, **options) != MATH)


def _tile_bytes(rows: int, keys: int, query: torch.Tensor) -> int:
    """What PyTorch's kernel for CPUs (`cpu_flash_attention`) takes: scores, sums and results in float32 for each thread, scores twice."""
    tile_rows = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    tile_keys = min(keys, 512)
    in_float32 = tile_rows * (tile_keys + 2 + query.shape[-1])
    reduced_bytes = query.element_size() * tile_rows * tile_keys if query.element_size() < 4 else 0
    return torch.get_num_threads() * (4 * in_float32 + reduced_bytes)
