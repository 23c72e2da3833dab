"""Parts of a megatron-core `GPTModel` that compute on any device, given to it in the places that its layer specification leaves open."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .megatron_core import require_megatron_core

__all__ = ["DotProductAttention", "RotaryPositions", "follow_autocast", "layer_specification", "takes_any_device"]


class DotProductAttention(nn.Module):
    """torch's `scaled_dot_product_attention` as a layer's core attention; megatron-core's own takes its buffers from CUDA.

    Args:
        config: the `TransformerConfig`.
        attention_dropout: None: as in the config.
        softmax_scale: None: one over the root of the head's size.
        recomputes: nothing is kept for the backward but queries, keys and values.
        kwargs: what megatron-core tells its own core attention besides.
    """

    def __init__(
        self,
        config: Any,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        recomputes: bool = False,
        **kwargs: Any,
    ):
        super().__init__()
        self.recomputes = recomputes
        self.dropout = float(config.attention_dropout if attention_dropout is None else attention_dropout)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """Attention of this process's heads.

        Args:
            query: [tokens, batch, heads, size of a head]; key, value: the same with as many heads as there are groups.
            attention_mask: bool, True where a query (second to last dimension) does not see a key; [batch or 1, 1, tokens, tokens].
                None: tokens see themselves and those before.

        Returns [tokens, batch, heads x size of a head].
        """
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self._attended, query, key, value, attention_mask, use_reentrant=False)
        return self._attended(query, key, value, attention_mask)

    def _attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        found = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return found.permute(2, 0, 1, 3).flatten(2)


class RotaryPositions(nn.Module):
    """Angles of rotary positions on the device of the model; megatron-core's own puts them on a CUDA device in the first forward.

    Args:
        frequencies: angle per token of each pair of features; [half the size of a head].
    """

    frequencies: torch.Tensor

    def __init__(self, frequencies: torch.Tensor):
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def get_rotary_seq_len(self, inference_context: Any, transformer: Any, transformer_input: torch.Tensor, *args: Any) -> int:
        """Tokens of a sequence; `transformer_input` is [tokens, batch, features]."""
        return transformer_input.shape[0]

    def forward(self, max_seq_len: int, offset: int = 0, **kwargs: Any) -> torch.Tensor:
        """Angles of the tokens from number `offset` on; [tokens, 1, 1, size of a head]."""
        places = torch.arange(offset, offset + max_seq_len, device=self.frequencies.device, dtype=torch.float32)
        angles = torch.outer(places, self.frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def layer_specification(plugin: Any) -> Any:
    """megatron-core's local layer specification, with torch's norms and attention; with `recompute_activations` also its recomputation."""
    require_megatron_core()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    recomputes = plugin.recompute_granularity if plugin.recompute_activations else None
    attention = ModuleSpec(module=DotProductAttention, params={"recomputes": recomputes == "selective"})
    layer.submodules.self_attention.submodules.core_attention = attention
    if recomputes == "full":
        layer.module = _recomputed_layer(plugin.recompute_num_layers if plugin.recompute_method == "block" else None)
    return layer


def _recomputed_layer(count: int | None) -> type:
    """A `TransformerLayer` that keeps its input alone for the backward: the first `count` of a model, or all."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class RecomputedTransformerLayer(TransformerLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            forward = super().forward
            if not torch.is_grad_enabled() or (count is not None and self.layer_number > count):
                return forward(*args, **kwargs)
            # megatron-core's own recomputation restores the random states of CUDA devices; torch's those of any.
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return RecomputedTransformerLayer


def follow_autocast(model: nn.Module) -> None:
    """Matrices of a `GPTModel` multiply under torch's autocast, which megatron-core's own backward follows on CUDA devices only."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = _linear


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, allreduce_dgrad: bool, tp_group: Any = None, **kwargs: Any
) -> torch.Tensor:
    """What megatron-core's linear layers compute; with `allreduce_dgrad` gradients of the input are added up over the group."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    return nn.functional.linear(copy_to_tensor_model_parallel_region(input, tp_group) if allreduce_dgrad else input, weight, bias)


def takes_any_device(model: nn.Module) -> bool:
    """Whether each attention of a `GPTModel` is of `layer_specification`."""
    cores = [module.core_attention for module in model.modules() if hasattr(module, "core_attention")]
    return bool(cores) and all(isinstance(core, DotProductAttention) for core in cores)
