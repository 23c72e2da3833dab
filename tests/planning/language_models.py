"""Tiny random language models of all kinds of cache, in evaluation mode, and the bytes that their caches hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()

VOCABULARY = 96

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, Callable[[], tuple[str, Any]]] = {
    "llama": lambda: ("LlamaForCausalLM", transformers.LlamaConfig(**TEXT)),
    "llama-multi-head": lambda: ("LlamaForCausalLM", transformers.LlamaConfig(**TEXT | {"num_key_value_heads": 4})),
    "llama-head_dim": lambda: ("LlamaForCausalLM", transformers.LlamaConfig(**TEXT, head_dim=16)),
    "gpt2": lambda: ("GPT2LMHeadModel", transformers.GPT2Config(vocab_size=96, n_positions=128, n_embd=32, n_layer=3, n_head=4)),
    "gpt_bigcode": lambda: ("GPTBigCodeForCausalLM", transformers.GPTBigCodeConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4)),
    "falcon": lambda: (
        "FalconForCausalLM",
        transformers.FalconConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True),
    ),
    "mistral": lambda: ("MistralForCausalLM", transformers.MistralConfig(**TEXT, sliding_window=6)),
    "qwen2": lambda: ("Qwen2ForCausalLM", transformers.Qwen2Config(**TEXT, use_sliding_window=False, sliding_window=6)),
    "gemma2": lambda: ("Gemma2ForCausalLM", transformers.Gemma2Config(**TEXT, head_dim=8, sliding_window=6, query_pre_attn_scalar=8)),
    "gemma3": lambda: (
        "Gemma3ForCausalLM",
        transformers.Gemma3TextConfig(
            **TEXT | {"num_hidden_layers": 7}, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, sliding_window_pattern=3
        ),
    ),
    "gemma3n": lambda: (
        "Gemma3nForCausalLM",
        transformers.Gemma3nTextConfig(**TEXT, head_dim=8, num_kv_shared_layers=2, vocab_size_per_layer_input=VOCABULARY),
    ),
    "llama4": lambda: (
        "Llama4ForCausalLM",
        transformers.Llama4TextConfig(**TEXT, head_dim=8, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=48),
    ),
    "qwen3_moe": lambda: ("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**TEXT, **EXPERTS, head_dim=8)),
    "gpt_oss": lambda: (
        "GptOssForCausalLM",
        transformers.GptOssConfig(**TEXT, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    ),
    "deepseek_v3": lambda: ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT)),
    "glm_moe_dsa": lambda: (
        "GlmMoeDsaForCausalLM",
        transformers.GlmMoeDsaConfig(**LATENT, index_n_heads=2, index_head_dim=8, index_topk=4),
    ),
    "mamba": lambda: ("MambaForCausalLM", transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "mamba2": lambda: (
        "Mamba2ForCausalLM",
        transformers.Mamba2Config(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=8, head_dim=8, n_groups=2),
    ),
    "jamba": lambda: (
        "JambaForCausalLM",
        transformers.JambaConfig(**TEXT, attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=4, use_mamba_kernels=False),
    ),
    "bamba": lambda: ("BambaForCausalLM", transformers.BambaConfig(**TEXT, **MAMBA_HEADS, attn_layer_indices=[1], mamba_n_groups=1)),
    "falcon_h1": lambda: ("FalconH1ForCausalLM", transformers.FalconH1Config(**TEXT, **MAMBA_HEADS, mamba_d_ssm=64)),
    "nemotron_h": lambda: (
        "NemotronHForCausalLM",
        transformers.NemotronHConfig(
            **{key: value for key, value in TEXT.items() if key != "num_hidden_layers"},
            layers_block_type=["mamba", "attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=4,
            n_groups=1,
            head_dim=8,
        ),
    ),
    "lfm2": lambda: ("Lfm2ForCausalLM", transformers.Lfm2Config(**TEXT, full_attn_idxs=[1])),
    "qwen3_next": lambda: (
        "Qwen3NextForCausalLM",
        transformers.Qwen3NextConfig(
            **TEXT,
            **EXPERTS,
            shared_expert_intermediate_size=16,
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "t5": lambda: (
        "T5ForConditionalGeneration",
        transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0),
    ),
    "bart": lambda: (
        "BartForConditionalGeneration",
        transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=128, forced_eos_token_id=None),
    ),
    "whisper": lambda: (
        "WhisperForConditionalGeneration",
        transformers.WhisperConfig(
            **ENCODER_DECODER,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=128,
            suppress_tokens=[],
            begin_suppress_tokens=[],
        ),
    ),
}


def config_of(name: str) -> Any:
    return CONFIGS[name]()[1]


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A random model; on "meta" only its shapes."""
    class_name, config = CONFIGS[name]()
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, class_name)(config).to(dtype).eval()


def inputs_for(name: str, batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(5))
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 40).to(dtype), "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if name in ("t5", "bart") else {})


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:  # counters are no state
                yield tensor


def cache_bytes(cache: Any) -> list[int]:
    """Bytes of the storages that each layer of a transformers cache keeps."""
    if hasattr(cache, "self_attention_cache"):
        pairs = zip(cache_bytes(cache.self_attention_cache), cache_bytes(cache.cross_attention_cache), strict=True)
        return [own + cross for own, cross in pairs]
    return [sum(tensor.untyped_storage().nbytes() for tensor in _tensors(layer)) for layer in cache.layers]
