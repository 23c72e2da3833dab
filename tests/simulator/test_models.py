"""Tiny random transformers models give on a simulated accelerator exactly what they give on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(**TEXT, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


def mixtral(experts: str) -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(
        **TEXT, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def t5() -> transformers.PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, feed_forward_proj="gated-gelu"
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> transformers.PreTrainedModel:
    return transformers.BertModel(transformers.BertConfig(**TEXT, intermediate_size=64))


def vit() -> transformers.PreTrainedModel:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": llama,
    "mixtral-eager": lambda: mixtral("eager"),
    "mixtral-grouped_mm": lambda: mixtral("grouped_mm"),
    "mixtral-batched_mm": lambda: mixtral("batched_mm"),
    "t5": t5,
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["eager", "sdpa"])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(make: Callable[[], transformers.PreTrainedModel], device: torch.device, dtype: torch.dtype, attention: str = "sdpa"):
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    model.set_attn_implementation(attention)
    return model, copy.deepcopy(model).to(device)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_language_models(accelerators, name: str, dtype: torch.dtype, attention: str) -> None:
    (device,) = accelerators(1)
    model, on_device = pair(MODELS[name], device, dtype, attention)
    ids = torch.randint(1, 64, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    device_inputs = {key: value.to(device) for key, value in inputs.items()}
    extra = {"decoder_input_ids": ids} if name == "t5" else {}
    device_extra = {key: value.to(device) for key, value in extra.items()}

    logits = on_device(**device_inputs, **device_extra).logits
    assert logits.device == device
    assert torch.equal(logits.cpu(), model(**inputs, **extra).logits)
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        options |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(on_device.generate(**device_inputs, **options).cpu(), model.generate(**inputs, **options))


@torch.no_grad()
def test_bert(accelerators, dtype: torch.dtype, attention: str) -> None:
    (device,) = accelerators(1)
    model, on_device = pair(bert, device, dtype, attention)
    ids = torch.randint(1, 64, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    wanted, seen = model(ids, attention_mask=mask), on_device(ids.to(device), attention_mask=mask.to(device))
    assert torch.equal(seen.last_hidden_state.cpu(), wanted.last_hidden_state)
    assert torch.equal(seen.pooler_output.cpu(), wanted.pooler_output)


@pytest.mark.parametrize("size", [16, 24])
@torch.no_grad()
def test_vit(accelerators, dtype: torch.dtype, attention: str, size: int) -> None:
    (device,) = accelerators(1)
    model, on_device = pair(vit, device, dtype, attention)
    image = torch.randn(2, 3, size, size, dtype=dtype)
    options = {"interpolate_pos_encoding": size != 16}
    assert torch.equal(on_device(image.to(device), **options).logits.cpu(), model(image, **options).logits)
