"""What activations take by a formula, for models whose code is not there or does not run on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config_fields import UNREADABLE, ConfigFields, text_config
from .live_bytes import rounded

__all__ = ["Activations", "estimated_activations"]


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a forward takes beside weights and cache, by formula."""

    workspace_bytes: int
    """The larger of attention and feed-forward network of one block, with the hidden states around them."""
    logits_bytes: int
    """Logits in the dtype of the activations, 0 without a vocabulary."""
    vocabulary: int
    """Entries of the vocabulary, 0 without one."""


def estimated_activations(config: Any, batch: int, tokens: int, item_bytes: int, *, last_logits: bool = False) -> Activations | None:
    """The estimate for `batch` sequences of `tokens` tokens in one forward; None where the configuration has no sizes.

    With `T = batch × tokens`, `h` the hidden size, all in the dtype of the activations unless said otherwise:

    - around a block: residuals, normed input and output, `5 × T × h`, and two copies of the hidden states in float32 for the norm;
    - attention: queries, keys and values twice (before and after rotation), keys and values once more for all heads where they are grouped
      and there is a mask, the output; the mask `batch × tokens²` (1 byte and once as numbers) where there is padding (a batch), a
      window, or attention is eager; eager attention writes scores `batch × heads × tokens²` out three times, and once in float32;
    - feed-forward: gate, up, their product: `3 × T × intermediate`; with experts as many as each token takes, their inputs and outputs, and
      the shared ones.

    It is made for decoders of attention and feed-forward blocks; recurrences and relative positions take more.
    """
    fields = ConfigFields(text_config(config))
    hidden = fields.get("hidden_size", "n_embd", "d_model", "n_embed")
    heads = fields.get("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return None
    try:
        found = _calculated(fields, hidden, heads, batch, tokens, item_bytes, last_logits=last_logits)
    except UNREADABLE:
        return None
    return found if min(found.workspace_bytes, found.logits_bytes) >= 0 else None


def _calculated(
    fields: ConfigFields, hidden: int, heads: int, batch: int, tokens: int, item_bytes: int, *, last_logits: bool
) -> Activations:
    rows = batch * tokens
    around_bytes = rows * hidden * (5 * item_bytes + 2 * 4)
    vocabulary = fields.number("vocab_size", default=0)
    logits_rows = batch if last_logits else rows
    attention_bytes = _attention(fields, batch, tokens, hidden, heads, item_bytes)
    network_bytes = rows * _network_width(fields, hidden) * item_bytes
    return Activations(
        rounded(around_bytes + max(attention_bytes, network_bytes)), rounded(logits_rows * vocabulary * item_bytes), vocabulary
    )


def _attention(fields: ConfigFields, batch: int, tokens: int, hidden: int, heads: int, item_bytes: int) -> int:
    rows, pairs = batch * tokens, batch * tokens * tokens
    nope_dim = fields.get("qk_nope_head_dim")
    if fields.get("kv_lora_rank") is not None and isinstance(nope_dim, int):
        key_width = heads * (nope_dim + fields.number("qk_rope_head_dim", default=0))
        kv_width, query_width = key_width + heads * fields.number("v_head_dim", default=nope_dim), key_width
    else:
        head_dim = fields.get("head_dim", "d_kv", "kv_channels") or hidden // heads
        grouped = 1 if fields.get("multi_query") else fields.get("num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
        query_width, kv_width = heads * head_dim, 2 * (grouped if isinstance(grouped, int) else heads) * head_dim
    eager = fields.get("_attn_implementation", "attn_implementation") == "eager"
    masked = batch > 1 or eager or fields.get("sliding_window", "attention_chunk_size") is not None
    repeated = 2 * query_width if masked and kv_width < 2 * query_width else 0
    nbytes = rows * (3 * query_width + 2 * kv_width + repeated) * item_bytes
    if masked:
        nbytes += pairs * (1 + item_bytes)
    if eager:
        nbytes += pairs * heads * (3 * item_bytes + 4)
    return int(nbytes)


def _network_width(fields: ConfigFields, hidden: int) -> int:
    """Elements for each token in the widest feed-forward network."""
    dense = fields.get("intermediate_size", "ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size") or 4 * hidden
    widest = 3 * (max(dense) if isinstance(dense, list) else int(dense))
    taken = fields.get("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    if isinstance(taken, int):
        each = fields.number("moe_intermediate_size", "expert_ffn_hidden_size", default=int(dense) if isinstance(dense, int) else hidden)
        shared = fields.get("shared_expert_intermediate_size") or fields.number("n_shared_experts", default=0) * each
        widest = max(widest, taken * (3 * each + 2 * hidden) + 3 * int(shared))
    return widest
