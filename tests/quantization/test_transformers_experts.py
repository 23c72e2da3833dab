"""Mixture-of-experts models of transformers whose stacked experts are packed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import bigmodel
from bigmodel import placement
from bigmodel.modules import owner_of
from bigmodel.planning import plan
from bigmodel.quantization import packed_layers, scheme_of
from bigmodel.quantization.packed_stack import PackedStack

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "Qwen2Moe": (
        "Qwen2MoeConfig",
        {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "Qwen3Moe": ("Qwen3MoeConfig", {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}),
    "DeepseekV3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "GptOss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}
CONFIGS = {
    "nf4": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "fp4 twice": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
}
TOKENS = torch.arange(2, 22).view(2, 10)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    return saved(request.param, tmp_path)


def saved(name: str, tmp_path: Any) -> Any:
    torch.manual_seed(0)
    config_class, arguments = MODELS[name]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config_class)(**(BASE | arguments))).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / name)
    return tmp_path / name


def stacks(model: nn.Module) -> dict[str, PackedStack]:
    return {name: layer for name, layer in packed_layers(model).items() if isinstance(layer, PackedStack)}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def with_unpacked_experts(folder: Any, packed: nn.Module) -> nn.Module:
    """The unpacked model with the packed one's linear layers, and with experts of the values that the packed ones stand for."""
    model = bigmodel.from_pretrained(folder, device_map=None)
    model.set_experts_implementation("eager")
    for name, layer in packed_layers(packed).items():
        if isinstance(layer, PackedStack):
            owner, key = owner_of(model, name)
            owner._parameters[key].data = layer.unpacked()
        else:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, layer)
    return model


def test_logits_are_those_of_the_unpacked_values_and_bytes_those_of_the_plan(folder, config):
    model = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"})
    original = bigmodel.from_pretrained(folder, device_map=None)
    assert set(stacks(model)) == {name for name, each in original.named_parameters() if each.dim() == 3}
    for name, stack in stacks(model).items():
        value = original.get_parameter(name)
        assert stack.shape == value.shape
        assert (stack.unpacked().float() - value.float()).norm() < 0.2 * value.float().norm()
    assert torch.equal(logits(model), logits(with_unpacked_experts(folder, model)))
    planned = plan(original, {"cpu": "1GB"}, weight_format=scheme_of(config).format).total_bytes
    assert planned == sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    rows = {row.name: row for row in bigmodel.quantization_report(model).layers}
    for name, stack in stacks(model).items():
        assert rows[name].format == scheme_of(config).format.name
        assert rows[name].unpacked_bytes == original.get_parameter(name).nbytes
        assert rows[name].nbytes == sum(each.nbytes for each in stack.parameters())


def test_experts_on_disk_compute_the_same(folder, config):
    resident = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"})
    away = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"})
    assert {row.name for row in placement(away).rows if row.rests == "disk"} == {"model.layers.1", "model.layers.2"}
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(resident.generate(TOKENS, **arguments), away.generate(TOKENS, **arguments))
    assert torch.equal(logits(resident), logits(away))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "model.layers.1": "disk"}])
def test_saved_models_load_again(folder, tmp_path, config, device_map):
    model = bigmodel.from_pretrained(folder, quantization=config, device_map=device_map)
    model.save_pretrained(tmp_path / "saved")
    again = bigmodel.from_pretrained(tmp_path / "saved", device_map={"": "cpu", "model.layers.2": "disk"})
    assert set(stacks(again)) == set(stacks(model))
    assert torch.equal(logits(again), logits(model))


def test_saving_says_what_transformers_cannot_load(tmp_path, caplog):
    folder = saved("Mixtral", tmp_path)
    model = bigmodel.from_pretrained(folder, quantization=CONFIGS["int8"], device_map={"": "cpu"})
    with pytest.raises(bigmodel.QuantizationError, match=r"save_original_format=True .* load packed experts \(model\.layers\.0\.mlp"):
        model.save_pretrained(tmp_path / "saved", save_original_format=True)
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(tmp_path / "saved")
    assert "is for bigmodel.from_pretrained: transformers cannot load packed experts" in caplog.text


def test_kept_packed_experts_are_read_again(tmp_path, config):
    folder = saved("Mixtral", tmp_path)
    first = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"}, packed_cache=tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    written = file.stat().st_mtime_ns
    again = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"}, packed_cache=tmp_path / "kept")
    assert file.stat().st_mtime_ns == written
    assert torch.equal(logits(first), logits(again))


def test_int8_experts_on_disk_generate_as_resident_ones_where_activations_stand_out(tmp_path):
    folder = saved("Qwen3Moe", tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.5)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = []
    for device_map in ({"": "cpu"}, {"": "cpu", "model.layers.0": "disk", "model.layers.2": "disk"}):
        model = bigmodel.from_pretrained(folder, quantization=config, device_map=device_map)
        found.append((logits(model), model.generate(TOKENS, **arguments)))
    all_in_int8 = bigmodel.from_pretrained(
        folder, quantization=transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), device_map={"": "cpu"}
    )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(logits(all_in_int8), found[0][0])  # the threshold was reached


def test_a_choice_that_takes_experts_by_index_stays(tmp_path):
    folder = saved("Mixtral", tmp_path)
    model = bigmodel.from_pretrained(folder, quantization=CONFIGS["nf4"], device_map={"": "cpu"})
    assert model.get_experts_implementation() == {"": "eager"}
    model.set_experts_implementation("batched_mm")
    unpacked = with_unpacked_experts(folder, model)
    unpacked.set_experts_implementation("batched_mm")
    assert torch.equal(logits(model), logits(unpacked))
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(AttributeError, match="all expert matrices at once"):
        logits(model)


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_packed_experts_are_compared_with_the_single_matrices_of_their_checkpoint(tmp_path, kind):
    name, arguments = MODELS[kind]
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**BASE, **arguments})).eval()
    plain.save_pretrained(tmp_path)
    model = bigmodel.from_pretrained(tmp_path, quantization="int8", device_map={"": "cpu"})
    found = bigmodel.quantization_report(model, tmp_path)
    stacks = {name: layer for name, layer in packed_layers(model).items() if isinstance(layer, PackedStack)}
    assert stacks
    errors = {layer.name: layer.relative_error for layer in found.layers if layer.format}
    for stack, layer in stacks.items():
        exact = plain.get_parameter(stack)
        assert errors[stack] == pytest.approx(((layer.unpacked() - exact).norm() / exact.norm()).item(), rel=1e-5)
    assert all(0 < error < 0.02 for error in errors.values())
    assert copy.deepcopy(model)(torch.arange(5)[None]).logits.isfinite().all()
