"""Tiny random transformers models of many families, saved sharded as transformers saves them, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 96

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One kind of model: how to make it, and what to feed it."""

    class_name: str
    config: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    generates: bool = True

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.class_name)


def _tokens(length: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"input_ids": torch.randint(3, VOCABULARY, (2, length), generator=generator)}


def _encoder_decoder_tokens() -> dict[str, torch.Tensor]:
    return _tokens() | {"decoder_input_ids": _tokens(4)["input_ids"]}


def _image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))}


def _audio() -> dict[str, torch.Tensor]:
    features = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(5))
    return {"input_features": features, "decoder_input_ids": _tokens(4)["input_ids"][:1]}


IMAGE_TOKEN = 4


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8, projection_dim=32
    )
    text = transformers.LlamaConfig(**TEXT)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=4)


def _image_in_text() -> dict[str, torch.Tensor]:
    tokens = _tokens()["input_ids"].clamp(min=IMAGE_TOKEN + 1)
    tokens[:, 1:5] = IMAGE_TOKEN
    return {"input_ids": tokens} | _image()


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "in_channels": 3}
    text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TEXT), _tokens),
    "llama-tied": Family("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TEXT, tie_word_embeddings=True), _tokens),
    "gpt2": Family(
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=4, n_head=4, eos_token_id=2),
        _tokens,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
            tie_word_embeddings=True,
        ),
        _encoder_decoder_tokens,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        ),
        _encoder_decoder_tokens,
    ),
    "mixtral": Family(
        "MixtralForCausalLM", lambda: transformers.MixtralConfig(**TEXT, num_local_experts=12, num_experts_per_tok=2), _tokens
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        lambda: transformers.Qwen2MoeConfig(
            **TEXT, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2
        ),
        _tokens,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(**TEXT, head_dim=8, moe_intermediate_size=16, num_experts=12, num_experts_per_tok=2),
        _tokens,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **(TEXT | {"num_key_value_heads": 4}),
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
        _tokens,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(**TEXT, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
        _tokens,
    ),
    "gemma": Family("GemmaForCausalLM", lambda: transformers.GemmaConfig(**TEXT, head_dim=8), _tokens),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
        _tokens,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=20,
            max_target_positions=32,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            suppress_tokens=[],
            begin_suppress_tokens=[],
        ),
        _audio,
        generates=False,
    ),
    "vit": Family(
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4, num_labels=5
        ),
        _image,
        generates=False,
    ),
    "llava": Family("LlavaForConditionalGeneration", _llava, _image_in_text, generates=False),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", _qwen2_vl, _tokens, generates=False),
    "nomic_bert": Family(
        "NomicBertForMaskedLM",
        lambda: transformers.NomicBertConfig(**{key: value for key, value in TEXT.items() if key != "num_key_value_heads"}),
        _tokens,
        generates=False,
    ),
    "bert": Family(
        "BertForMaskedLM",
        lambda: transformers.BertConfig(**{key: value for key, value in TEXT.items() if key != "num_key_value_heads"}),
        _tokens,
        generates=False,
    ),
}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of the family, whose every tensor is random (also norms and biases, which start as ones and zeros)."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = family.config()
    for key, value in changes.items():
        setattr(config, key, value)
    model = family.model_class(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def save(model: Any, folder: Path, **arguments: Any) -> Path:
    """Saves with transformers' own method, in shards of a few tensors."""
    model.save_pretrained(folder, **{"max_shard_size": "24KB"} | arguments)
    return folder


def reference(folder: Path, name: str, **arguments: Any) -> Any:
    """The same checkpoint, loaded by transformers, in memory of its own.

    transformers maps the file, where a tensor may start at any multiple of 8 bytes; on some processors the last bit of a product depends
    on where its operands start in memory.
    """
    model = FAMILIES[name].model_class.from_pretrained(folder, **arguments)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.clone()
    return model
