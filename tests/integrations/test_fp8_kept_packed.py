"""Checkpoints of 8-bit floats in blocks, kept as they are in models of transformers, stacked experts included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import bigmodel
from bigmodel.integrations.transformers import from_pretrained
from bigmodel.quantization import PackedStack, pack, packed_layers
from bigmodel.quantization.fp8_blocks import Fp8Blocks

BASE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.arange(2, 22).view(2, 10)


def moe(width: int) -> Qwen3MoeForCausalLM:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width, "head_dim": 16, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**BASE, **experts, pad_token_id=0))


def in_8bit_floats(model: torch.nn.Module, folder: Path) -> Path:
    """A checkpoint as DeepSeek's: projections and experts, one by one, in 8-bit floats."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        made = pack(tensors[name], Fp8Blocks())
        tensors[name], tensors[f"{name}_scale_inv"] = made["weight"], made["weight_scale_inv"]
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "model.layers.1": "disk"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_kept_and_compute_what_their_values_do(tmp_path, device_map, dtype):
    torch.manual_seed(0)
    folder = in_8bit_floats(LlamaForCausalLM(LlamaConfig(**BASE)), tmp_path)
    kept = from_pretrained(folder, dtype=dtype, device_map=device_map, quantization="fp8")
    values = from_pretrained(folder, dtype=dtype, device_map=device_map)
    assert len(packed_layers(kept)) == 2 * 7
    assert packed_layers(values) == {}
    assert torch.equal(logits(kept), logits(values))
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(kept.generate(TOKENS, **arguments), values.generate(TOKENS, **arguments))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "model.layers.1": "disk"}])
@pytest.mark.parametrize("width", [128, 96])
def test_experts_are_stacked_packed_where_blocks_meet(tmp_path, device_map, width):
    torch.manual_seed(0)
    folder = in_8bit_floats(moe(width), tmp_path / "fp8")
    kept = from_pretrained(folder, dtype=torch.float32, device_map=device_map, quantization="fp8")
    stacks = {name.rpartition(".")[2] for name, layer in packed_layers(kept).items() if isinstance(layer, PackedStack)}
    assert stacks == ({"gate_up_proj", "down_proj"} if width % 128 == 0 else {"down_proj"})
    values = from_pretrained(folder, dtype=torch.float32, device_map=device_map)
    values.set_experts_implementation("eager")
    assert torch.equal(logits(kept), logits(values))
    planned = bigmodel.plan(kept, {"cpu": "1GB"}).total_bytes
    assert planned == sum(each.nbytes for each in (*kept.parameters(), *kept.buffers())) if device_map == {"": "cpu"} else planned > 0
    kept.save_pretrained(tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved", dtype=torch.float32, device_map={"": "cpu"}, quantization="fp8")
    assert sorted(packed_layers(again)) == sorted(packed_layers(kept))
    assert torch.equal(logits(again), logits(kept))


def test_floats_are_packed_to_8bit_floats_and_saved_as_such(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**BASE)).save_pretrained(tmp_path / "plain")
    model = from_pretrained(tmp_path / "plain", device_map={"": "cpu"}, quantization="fp8")
    model.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert written == {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    assert torch.equal(logits(from_pretrained(tmp_path / "saved", device_map={"": "cpu"}, quantization="fp8")), logits(model))
    assert torch.equal(logits(from_pretrained(tmp_path / "saved", device_map={"": "cpu"})), logits(model))


def test_layers_that_keep_their_weight_transposed_are_left_with_the_reason(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    model = from_pretrained(tmp_path / "plain", device_map={"": "cpu"}, quantization="fp8")
    assert packed_layers(model) == {}
    assert "it keeps its weight transposed, which fp8 does not pack" in str(bigmodel.quantization_report(model))
    assert torch.equal(logits(model), logits(from_pretrained(tmp_path / "plain", device_map={"": "cpu"})))


@pytest.mark.parametrize("make", [lambda: LlamaForCausalLM(LlamaConfig(**BASE)), lambda: moe(128)], ids=["llama", "experts"])
def test_plans_count_what_loading_allocates(tmp_path, make):
    torch.manual_seed(0)
    folder = in_8bit_floats(make(), tmp_path)
    for dtype in ("bfloat16", "fp8"):
        loading = {"quantization": "fp8"} if dtype == "fp8" else {"dtype": dtype}
        model = from_pretrained(folder, device_map={"": "cpu"}, **loading)
        planned = bigmodel.plan(folder, {"cpu": "1GB"}, dtype=dtype)
        assert planned.total_bytes == sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        again = from_pretrained(folder, device_map=planned, **loading)
        assert torch.equal(logits(again), logits(model))
