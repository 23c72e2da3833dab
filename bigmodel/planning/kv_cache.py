"""What each layer of a language model keeps of the tokens that it has seen, read from the model's configuration.

The configuration is an object with attributes or the mapping of a `config.json`; both spell the same fields. The shapes are those of the
cache classes of transformers 5.24 (`cache_utils`): `(batch, heads, tokens, width)` for keys and for values, `(batch, channels, kernel)`
and `(batch, …state…)` for convolutions and recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config_fields import UNREADABLE, ConfigFields, text_config

__all__ = ["CacheLayer", "cache_layers"]

RECURRENT_ITEM_BYTES = 4
"""Recurrent states are kept in float32, whatever the activations are in."""

MOST_LAYERS = 100_000
"""Configurations of more layers are not believed."""

_NO_CACHE = frozenset({"moe", "mlp", "dummy"})
_LINEAR = frozenset({"linear_attention", "mamba", "mamba2", "recurrent"})
_HYBRID = frozenset({"hybrid", "hybrid_sliding"})


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one layer keeps of every sequence. All counts are elements, not bytes."""

    token_width: int = 0
    """Elements that are kept of each token: keys and values of all heads, or what latent attention compresses them to."""
    window: int | None = None
    """Tokens that sliding or chunked attention keeps at most; None: all of them."""
    cross_width: int = 0
    """Elements that are kept of each token of the encoder, for cross attention."""
    cross_tokens: int | None = None
    """Tokens of the encoder, where the model fixes their number; None: as many as the context."""
    conv_width: int = 0
    """Elements of the convolution's state, in the dtype of the activations."""
    recurrent_width: int = 0
    """Elements of the recurrent state, in float32."""

    @property
    def is_possible(self) -> bool:
        """Whether none of the counts is negative."""
        counts = (self.token_width, self.cross_width, self.conv_width, self.recurrent_width, self.window or 0, self.cross_tokens or 0)
        return min(counts) >= 0

    def bytes_at_rest(self, batch: int, context: int, item_bytes: float) -> int:
        """Bytes that a cache of fixed size allocates for `batch` sequences of `context` tokens."""
        return self._bytes(batch, context, context if self.window is None else min(self.window, context), item_bytes)

    def bytes_held(self, batch: int, context: int, prompt: int, item_bytes: float) -> int:
        """Bytes that a growing cache holds at most, where forwards take up to `prompt` tokens.

        A sliding layer that grows keeps its last tokens as a view of what the last forward brought, so that the whole of that stays.
        """
        tokens = context if self.window is None else min(self.window - 1 + prompt, context)
        return self._bytes(batch, context, tokens, item_bytes)

    def _bytes(self, batch: int, context: int, tokens: int, item_bytes: float) -> int:
        cross_tokens = context if self.cross_tokens is None else self.cross_tokens
        kept = self.token_width * tokens + self.cross_width * cross_tokens + self.conv_width
        return batch * (math.ceil(kept * item_bytes) + self.recurrent_width * RECURRENT_ITEM_BYTES)


def cache_layers(config: Any) -> list[CacheLayer] | None:
    """What each layer of the (decoding) language model keeps, in order; None where the configuration does not tell.

    Models that keep nothing, as encoders do, are not told from those that decode: the list is what they would keep if they did.
    """
    fields = ConfigFields(text_config(config))
    try:
        layers = [_layer(fields, kind, index) for index, kind in enumerate(_layer_kinds(fields))]
    except UNREADABLE:
        return None
    return layers if all(layer.is_possible for layer in layers) else None


def _layer_kinds(fields: ConfigFields) -> list[str]:
    """The kind of every layer in the words of transformers' `layer_types`."""
    given = fields.get("layer_types", "layers_block_type", "block_types")
    pattern = fields.get("hybrid_override_pattern")
    if given is None and isinstance(pattern, str):
        given = [{"M": "mamba", "*": "attention"}.get(letter, "mlp") for letter in pattern]
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    count = fields.number(
        "decoder_layers",
        "num_decoder_layers",
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        default=len(given) if listed else None,
    )
    if count > MOST_LAYERS:
        raise ValueError(f"{count} layers")
    if listed:
        kinds = [_KIND_NAMES.get(str(kind), str(kind)) for kind in given[:count]]
        if any(kind == "hybrid" for kind in kinds) and fields.get("model_type") in ("zamba", "zamba2"):
            raise KeyError("layers_block_type")  # there a hybrid layer shares its attention with others
    else:
        kinds = _unlisted_kinds(fields, count)
    shared = fields.number("num_kv_shared_layers", default=0)
    return [kind if index < count - shared else "dummy" for index, kind in enumerate(kinds)]


_KIND_NAMES = {"attention": "full_attention", "sliding": "sliding_attention", "global": "full_attention", "local": "sliding_attention"}


def _unlisted_kinds(fields: ConfigFields, count: int) -> list[str]:
    """The kinds of layers where a configuration gives rules, or nothing, instead of a list."""
    interval = fields.get("full_attention_interval")
    if isinstance(interval, int):
        return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    period = fields.get("attn_layer_period")
    if isinstance(period, int):
        offset = fields.number("attn_layer_offset", default=0)
        return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]
    indices = fields.get("attn_layer_indices", "full_attn_idxs")
    if isinstance(indices, Sequence):
        other = "conv" if fields.get("conv_L_cache") is not None else "linear_attention"
        return ["full_attention" if index in indices else other for index in range(count)]
    if fields.get("state_size") is not None:
        return ["linear_attention"] * count
    if fields.get("mamba_d_ssm") is not None:
        return ["hybrid"] * count
    ropes = fields.get("no_rope_layers")
    if fields.get("attention_chunk_size") is not None:
        if isinstance(ropes, Sequence) and len(ropes) == count:
            return ["chunked_attention" if rope else "full_attention" for rope in ropes]
        return ["full_attention"] * count
    if not isinstance(fields.get("sliding_window"), int) or fields.get("use_sliding_window") is False:
        return ["full_attention"] * count
    every = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(every, int) and every > 0:
        return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(count)]
    if fields.get("query_pre_attn_scalar") is not None:  # Gemma's first configurations alternate without saying so
        return ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    first = fields.number("max_window_layers", default=0) if fields.get("use_sliding_window") else 0
    return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]


def _layer(fields: ConfigFields, kind: str, index: int) -> CacheLayer:
    if kind in _NO_CACHE:
        return CacheLayer()
    conv_width, recurrent_width = _state(fields, kind) if kind in _LINEAR | _HYBRID | {"conv"} else (0, 0)
    if kind in _LINEAR or kind == "conv":
        return CacheLayer(conv_width=conv_width, recurrent_width=recurrent_width)
    heads = _per_layer(fields.get("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads", "n_heads"), index)
    width = _token_width(fields, kind, heads, index)
    window: int | None = None
    if kind in ("sliding_attention", "hybrid_sliding"):
        window = fields.number("sliding_window")
    elif kind == "chunked_attention":
        window = fields.number("attention_chunk_size")
    cross = bool(fields.get("is_encoder_decoder"))
    return CacheLayer(
        token_width=width,
        window=window,
        cross_width=width if cross else 0,
        cross_tokens=fields.get("max_source_positions") if cross and fields.get("num_mel_bins") is not None else None,
        conv_width=conv_width,
        recurrent_width=recurrent_width,
    )


def _per_layer(value: Any, index: int) -> int:
    """A number, or this layer's number of a list of them. Raises KeyError for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[index]
    if not isinstance(value, int) or isinstance(value, bool):
        raise KeyError("number of heads")
    return value


def _token_width(fields: ConfigFields, kind: str, heads: int, index: int) -> int:
    """Elements of keys and values of one token."""
    latent = fields.get("kv_lora_rank")
    if latent is not None:
        # Multi-head latent attention keeps the latent vector and the part of the key that carries the position, once for all heads.
        indexed = fields.number("index_head_dim", default=0) if kind == "indexed_attention" else 0
        return int(latent) + fields.number("qk_rope_head_dim") + indexed
    hidden = fields.get("hidden_size", "n_embd", "d_model", "n_embed")
    head_dim = fields.get("global_head_dim") if kind == "full_attention" else None
    head_dim = head_dim or fields.get("head_dim", "d_kv", "kv_channels", "attention_head_dim")
    if head_dim is None:
        head_dim = int(hidden) // heads
    return 2 * _kv_heads(fields, kind, heads, index) * int(head_dim)


def _kv_heads(fields: ConfigFields, kind: str, heads: int, index: int) -> int:
    if kind == "full_attention":
        of_global = fields.get("num_global_key_value_heads")
        if isinstance(of_global, int):
            return of_global
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return fields.number("multi_query_group_num", default=1)
    inner = fields.get("attn_config")
    grouped = fields.get("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    if grouped is None and inner is not None:
        grouped = ConfigFields(inner).get("kv_n_heads")
    return heads if grouped is None else _per_layer(grouped, index)


def _state(fields: ConfigFields, kind: str) -> tuple[int, int]:
    """Elements of the states of a convolution and of a recurrence."""
    hidden = fields.number("hidden_size", "d_model")
    if kind == "conv":
        return hidden * fields.number("conv_L_cache"), 0
    if fields.get("linear_num_value_heads") is not None:  # gated delta rule
        key_dim, value_dim = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
        key_width = fields.number("linear_num_key_heads") * key_dim
        value_heads = fields.number("linear_num_value_heads")
        channels = 2 * key_width + value_heads * value_dim
        return channels * fields.number("linear_conv_kernel_dim"), value_heads * key_dim * value_dim
    state = fields.number("mamba_d_state", "ssm_state_size", "state_size")
    kernel = fields.number("mamba_d_conv", "conv_kernel", default=4)
    heads = fields.get("mamba_n_heads", "mamba_num_heads") or (fields.get("num_heads") if fields.get("n_groups") is not None else None)
    if heads is None:  # Mamba
        inner = fields.get("mamba_d_ssm", "intermediate_size") if fields.get("mamba_expand") is None else None
        inner = inner or hidden * fields.number("mamba_expand", "expand", default=2)
        return int(inner) * kernel, int(inner) * state
    head_dim = fields.get("mamba_d_head", "mamba_head_dim", "head_dim")  # Mamba 2
    if not isinstance(head_dim, int):
        head_dim = hidden * fields.number("mamba_expand", "expand", default=2) // int(heads)
    inner = int(heads) * head_dim
    groups = fields.number("mamba_n_groups", "n_groups", default=1)
    return (inner + 2 * groups * state) * kernel, inner * state
