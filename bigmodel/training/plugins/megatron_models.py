"""transformers models that megatron-core has a `GPTModel` for: its sizes, and where each tensor goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ...errors import TrainingError
from .megatron_names import Rule, as_it_is, heads_of, heads_of_columns, stacked, transposed

__all__ = ["Description", "described", "tied_names"]


@dataclass(frozen=True, slots=True)
class Description:
    """A model as megatron-core makes it."""

    sizes: dict[str, Any]
    """Arguments of its `TransformerConfig`."""
    arguments: dict[str, Any]
    """Arguments of its `GPTModel`."""
    rules: list[Rule]
    """Every tensor of the transformers model once; ties once."""
    frequencies: torch.Tensor | None = field(default=None)
    """Of rotary positions: angle per token of each pair of features."""


def described(model: nn.Module) -> Description:
    """What megatron-core makes of a transformers model. Raises `TrainingError` for one that it has no equal of."""
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", None))
    if kind not in FAMILIES:
        raise TrainingError(
            f"{type(model).__name__}: prepare a megatron-core GPTModel, or a transformers model of type {', '.join(FAMILIES)}"
            f"{'' if config is None else f', not {kind}'}; MegatronLMPlugin cannot say how Megatron-LM would compute others. "
            "A FullyShardedDataParallelPlugin shares any model between processes."
        )
    describe, last_norm = FAMILIES[kind]
    state = model.state_dict(keep_vars=True)
    words = getattr(model, "get_output_embeddings", lambda: None)()
    if last_norm not in state or words is None:
        raise _not_plain(model, kind, f"it has no {last_norm if words else 'prediction of words'}")
    found = describe(model, config)
    known = {source for rule in found.rules for source in rule.sources}
    tied = {id(state[name]) for name in known if name in state}
    lacking = sorted(known - set(state))
    strangers = sorted(name for name, value in state.items() if name not in known and id(value) not in tied)
    if lacking or strangers:
        raise _not_plain(model, kind, f"of its tensors {', '.join((lacking + strangers)[:3])} {'are missing' if lacking else 'are others'}")
    return found


def _not_plain(model: nn.Module, kind: str, why: str) -> TrainingError:
    return TrainingError(
        f"{type(model).__name__} is no plain causal {kind} model: {why}. Prepare it without adapters and with its word head, or use a "
        "FullyShardedDataParallelPlugin."
    )


def _refuse(config: Any, **wanted: Any) -> None:
    for name, value in wanted.items():
        there = getattr(config, name, value)
        if there != value:
            raise TrainingError(
                f"{name}={there!r} in the config of this {config.model_type} model: megatron-core's layers compute as with {value!r}. "
                "A FullyShardedDataParallelPlugin shares any model between processes."
            )


def _ties_words(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _activation(name: str) -> Callable[..., Any]:
    from transformers.activations import ACT2FN

    activation: Callable[..., Any] = ACT2FN[name]
    return activation


def _llama(model: Any, config: Any) -> Description:
    _refuse(config, attention_bias=False, mlp_bias=False, use_sliding_window=False)
    if config.model_type == "mistral":
        _refuse(config, sliding_window=None)
    has_bias = config.model_type == "qwen2"
    rotary = model.model.rotary_emb
    if rotary.attention_scaling != 1.0 or "dynamic" in rotary.rope_type or rotary.rope_type == "longrope":
        raise TrainingError(
            f"rope_type={rotary.rope_type!r}: its angles change with the length of sequences, or it scales attention; megatron-core's "
            "positions have fixed angles. A FullyShardedDataParallelPlugin shares any model between processes."
        )
    groups = config.num_key_value_heads
    rules = [as_it_is("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for number in range(config.num_hidden_layers):
        to, source = f"decoder.layers.{number}.", f"model.layers.{number}."
        for last in ("weight", "bias") if has_bias else ("weight",):
            queries, keys, values = (f"{source}self_attn.{one}_proj.{last}" for one in "qkv")
            of_group = config.num_attention_heads // groups
            rules.append(heads_of(f"{to}self_attention.linear_qkv.{last}", (queries, keys, values), groups, of_group))
        rules += [
            as_it_is(f"{to}input_layernorm.weight", f"{source}input_layernorm.weight"),
            as_it_is(f"{to}self_attention.linear_proj.weight", f"{source}self_attn.o_proj.weight"),
            as_it_is(f"{to}pre_mlp_layernorm.weight", f"{source}post_attention_layernorm.weight"),
            stacked(f"{to}mlp.linear_fc1.weight", f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight"),
            as_it_is(f"{to}mlp.linear_fc2.weight", f"{source}mlp.down_proj.weight"),
        ]
    rules.append(as_it_is("decoder.final_layernorm.weight", "model.norm.weight"))
    tied = _ties_words(model)
    if not tied:
        rules.append(as_it_is("output_layer.weight", "lm_head.weight"))
    sizes = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": groups,
        "kv_channels": model.model.layers[0].self_attn.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": _activation(config.hidden_act),
        "add_bias_linear": False,
        "add_qkv_bias": has_bias,
    }
    arguments = {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": tied,
    }
    return Description(sizes, arguments, rules, rotary.inv_freq)


def _gpt2(model: Any, config: Any) -> Description:
    _refuse(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    rules = [
        as_it_is("embedding.word_embeddings.weight", "transformer.wte.weight"),
        as_it_is("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    ]
    for number in range(config.n_layer):
        to, source = f"decoder.layers.{number}.", f"transformer.h.{number}."
        for last in ("weight", "bias"):
            matrix = transposed if last == "weight" else as_it_is
            rules += [
                as_it_is(f"{to}input_layernorm.{last}", f"{source}ln_1.{last}"),
                heads_of_columns(f"{to}self_attention.linear_qkv.{last}", f"{source}attn.c_attn.{last}", config.n_head),
                matrix(f"{to}self_attention.linear_proj.{last}", f"{source}attn.c_proj.{last}"),
                as_it_is(f"{to}pre_mlp_layernorm.{last}", f"{source}ln_2.{last}"),
                matrix(f"{to}mlp.linear_fc1.{last}", f"{source}mlp.c_fc.{last}"),
                matrix(f"{to}mlp.linear_fc2.{last}", f"{source}mlp.c_proj.{last}"),
            ]
    rules += [as_it_is(f"decoder.final_layernorm.{last}", f"transformer.ln_f.{last}") for last in ("weight", "bias")]
    tied = _ties_words(model)
    if not tied:
        rules.append(as_it_is("output_layer.weight", "lm_head.weight"))
    sizes = {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "num_attention_heads": config.n_head,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "gated_linear_unit": False,
        "activation_func": _activation(config.activation_function),
        "add_bias_linear": True,
    }
    arguments = {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": tied,
    }
    return Description(sizes, arguments, rules)


FAMILIES: Final[dict[str, tuple[Callable[[Any, Any], Description], str]]] = {
    "llama": (_llama, "model.norm.weight"),
    "mistral": (_llama, "model.norm.weight"),
    "qwen2": (_llama, "model.norm.weight"),
    "gpt2": (_gpt2, "transformer.ln_f.weight"),
}
"""By the `model_type` of a config; a tensor that only the whole causal model has under that name."""


def tied_names(rules: list[Rule], model: nn.Module) -> dict[str, str]:
    """Names of tensors that no rule has, each with the name of the same tensor that one has."""
    state = model.state_dict(keep_vars=True)
    known = {id(state[source]): source for rule in rules for source in rule.sources}
    return {name: known[id(value)] for name, value in state.items() if known[id(value)] != name}
