"""What layers keep of the tokens that they have seen, against the caches that transformers allocates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from language_models import CONFIGS, cache_bytes, config_of, inputs_for, make

import bigmodel
from bigmodel.planning.activations import estimated_activations
from bigmodel.planning.kv_cache import CacheLayer, cache_layers

BATCH, PROMPT, NEW = 2, 9, 4
DTYPES = [torch.float32, torch.bfloat16]


def layers_of(config: Any) -> list[CacheLayer]:
    layers = cache_layers(config)
    assert layers is not None
    return layers


def held(layers: list[CacheLayer], context: int, prompt: int, dtype: torch.dtype) -> list[int]:
    return [layer.bytes_held(BATCH, context, prompt, dtype.itemsize) for layer in layers]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_growing_caches_hold_what_is_planned_after_a_prompt(name: str, dtype: torch.dtype) -> None:
    model = make(name, dtype)
    found = model(**inputs_for(name, BATCH, PROMPT, dtype), use_cache=True)
    assert held(layers_of(model.config), PROMPT, PROMPT, dtype) == cache_bytes(found.cache)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"t5", "bart", "whisper"}))
@torch.no_grad()
def test_growing_caches_never_hold_more_than_planned_while_tokens_come(name: str) -> None:
    model = make(name)
    layers = layers_of(model.config)
    found = model(**inputs_for(name, BATCH, PROMPT), use_cache=True)
    for token in range(1, NEW + 1):
        found = model(torch.full((BATCH, 1), 5), cache=found.cache, use_cache=True)
        real = cache_bytes(found.cache)
        planned = [layer.bytes_held(BATCH, PROMPT + token, 1, 4) for layer in layers]
        # Layers whose window is not full yet hold exactly what has come; a full window holds one token less than `window + 1`.
        assert planned == real


@pytest.mark.parametrize("context", [4, 40])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gemma3", "llama4", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2"]
)
@torch.no_grad()
def test_static_caches_allocate_what_is_planned(name: str, context: int) -> None:
    model = make(name, torch.bfloat16)
    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    model(**inputs_for(name, BATCH, 3), cache=cache, use_cache=True)
    assert [layer.bytes_at_rest(BATCH, context, 2) for layer in layers_of(model.config)] == cache_bytes(cache)


@pytest.mark.parametrize("use_diff", [True, False], ids=["only-differences", "everything"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_says_the_same_as_the_object(name: str, use_diff: bool) -> None:
    config = config_of(name)
    assert cache_layers(json.loads(config.to_json_string(use_diff=use_diff))) == layers_of(config)


# As published with the models, without what later versions of transformers add to them.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
MISTRAL_7B_V01 = LLAMA_3_8B | {"sliding_window": 4096}
GEMMA_2_9B = {
    "head_dim": 256,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_3_4B = {
    "text_config": {
        "head_dim": 256,
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
}
GPT_2 = {"n_embd": 768, "n_head": 12, "n_layer": 12}
QWEN_2_7B = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
FALCON_7B = {"hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True}
DBRX = {"d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"kv_n_heads": 8}}


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "at_16384"),
    [
        (LLAMA_3_8B, 131_072, 2 << 30),
        (MISTRAL_7B_V01, 131_072, 512 << 20),
        (GEMMA_2_9B, 42 * 8192, 21 * 8192 * (16384 + 4096)),
        (GEMMA_3_4B, 34 * 4096, 5 * 4096 * 16384 + 29 * 4096 * 1024),
        (DEEPSEEK_V3, 61 * 576 * 2, 61 * 576 * 2 * 16384),
        (GPT_2, 12 * 2 * 768 * 2, 12 * 2 * 768 * 2 * 16384),
        (QWEN_2_7B, 28 * 2 * 4 * 128 * 2, 28 * 2 * 4 * 128 * 2 * 16384),
        (FALCON_7B, 32 * 2 * 64 * 2, 32 * 2 * 64 * 2 * 16384),
        (DBRX, 40 * 2 * 8 * 128 * 2, 40 * 2 * 8 * 128 * 2 * 16384),
    ],
    ids=["llama-3", "mistral", "gemma-2", "gemma-3", "deepseek-v3", "gpt-2", "qwen-2", "falcon", "dbrx"],
)
def test_published_configurations(config: dict[str, Any], bytes_per_token: int, at_16384: int) -> None:
    layers = layers_of(config)
    assert sum(layer.bytes_at_rest(1, 1, 2) for layer in layers) == bytes_per_token
    assert sum(layer.bytes_at_rest(1, 16384, 2) for layer in layers) == at_16384


def test_a_window_holds_a_whole_prompt_until_the_next_step() -> None:
    layer = CacheLayer(token_width=16, window=6)
    assert layer.bytes_at_rest(1, 100, 1) == 6 * 16
    assert layer.bytes_held(1, 100, 100, 1) == 100 * 16
    assert layer.bytes_held(1, 100, 1, 1) == 6 * 16
    assert layer.bytes_held(1, 4, 4, 1) == 4 * 16


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 3}, {"model_type": "unheard of"}, None])
def test_a_configuration_that_does_not_tell_is_none(config: Any) -> None:
    assert cache_layers(config) is None


SMALL = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0, "num_key_value_heads": 0},
        {"hidden_size": float("nan")},
        {"hidden_size": -8},
        {"hidden_size": "x"},
        {"num_hidden_layers": 10**12},
        {"head_dim": "x"},
        {"kv_lora_rank": "x", "qk_nope_head_dim": 3},
    ],
)
def test_a_configuration_that_cannot_be_tells_nothing(change: dict[str, Any]) -> None:
    assert cache_layers(SMALL) is not None
    assert estimated_activations(SMALL, 2, 64, 2) is not None
    assert cache_layers(SMALL | change) is None
    specs = {f"model.layers.{layer}.w.weight": {"dtype": "BF16", "shape": [64, 64]} for layer in range(4)}
    for config in (SMALL | change, SMALL | change | {"architectures": 5}):
        made = bigmodel.plan({"tensors": specs, "config": config}, {0: "1MiB", "cpu": "1MiB"}, context=64, batch=2)
        assert "Nothing is reserved for the KV cache: the configuration does not tell its size." in made.notes
        assert all(use.state_bytes >= 0 and use.workspace_bytes >= 0 for use in made.devices)


def test_configurations_inside_each_other_are_followed_to_an_end() -> None:
    assert cache_layers({"text_config": {"decoder": SMALL}}) == cache_layers(SMALL)
    nested: dict[str, Any] = {}
    nested["text_config"] = nested
    assert cache_layers(nested) is None
