"""What a plan keeps free for a run, by module, from code, from a configuration alone, and from neither."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from language_models import TEXT, config_of, make
from planning_models import Decoder
from torch import nn

import bigmodel.planning.needs as needs_module
from bigmodel.errors import PlanError
from bigmodel.planning import CustomDtype, plan, skeleton
from bigmodel.planning.kv_cache import cache_layers
from bigmodel.planning.needs import Needs, Workload, needs_of
from bigmodel.protocols import TensorSpec
from bigmodel.quantization import FourBit, weight_format

CONTEXT = 64
ROOM = 1 << 30


def names_only(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """The tree that headers and a config.json make: names and shapes, and no code."""
    model = make(name, dtype, "meta")
    tree = skeleton({key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()})
    class_name = type(model).__name__
    tree.config = json.loads(model.config.to_json_string()) | {"architectures": [class_name]} | changes
    return tree


def cache_of(needs: Needs, path: str) -> dict[str, int]:
    """State of the blocks."""
    return {name: nbytes for name, nbytes in needs.state_bytes.items() if name.startswith(path)}


def held(name: str, batch: int, context: int, item_bytes: int) -> list[int]:
    layers = cache_layers(config_of(name))
    assert layers is not None
    return [layer.bytes_held(batch, context, context, item_bytes) for layer in layers]


def test_without_a_context_nothing_is_reserved() -> None:
    assert needs_of(make("llama"), Workload(batch=4)) == Needs()
    assert needs_of(Decoder(), Workload()) == Needs()


LISTS = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "gemma3": "model.layers",
    "deepseek_v3": "model.layers",
    "mamba": "backbone.layers",
    "qwen3_next": "model.layers",
    "t5": "decoder.block",
    "whisper": "model.decoder.layers",
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("known", ["code", "names"])
def test_each_blocks_cache_is_kept_with_it(name: str, known: str) -> None:
    model = make(name, torch.bfloat16, "meta") if known == "code" else names_only(name)
    found = needs_of(model, Workload(batch=2, context=CONTEXT))
    expected = {f"{LISTS[name]}.{layer}": nbytes for layer, nbytes in enumerate(held(name, 2, CONTEXT, 2))}
    cache = cache_of(found, LISTS[name])
    counter_bytes = 16 if name == "gemma3" and known == "code" else 0  # sliding layers carry their window
    assert cache.keys() == expected.keys()
    assert all(0 <= cache[block] - expected[block] <= counter_bytes for block in expected)


def test_a_cache_in_another_dtype() -> None:
    model = make("llama", torch.float32, "meta")
    whole, byte, packed = (
        sum(cache_of(needs_of(model, Workload(context=CONTEXT, cache_dtype=dtype)), "model.layers").values())
        for dtype in (None, torch.float8_e4m3fn, CustomDtype.INT4)
    )
    assert whole == sum(held("llama", 1, CONTEXT, 4))
    assert (byte, packed) == (whole // 4, whole // 8)


def test_loading_in_half_precision_halves_the_cache() -> None:
    model = make("llama", torch.float32, "meta")
    assert sum(cache_of(needs_of(model, Workload(context=CONTEXT), "bfloat16"), "model.layers").values()) == sum(
        held("llama", 1, CONTEXT, 2)
    )


@pytest.mark.parametrize("known", ["code", "names"])
def test_encoders_keep_nothing(known: str) -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=96)
    with torch.device("meta"):
        model: nn.Module = transformers.BertForMaskedLM(config)
    if known == "names":
        tree = skeleton({key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()})
        tree.config = json.loads(config.to_json_string()) | {"architectures": ["BertForMaskedLM"]}
        model = tree
    found = needs_of(model, Workload(batch=2, context=CONTEXT))
    assert found.workspace_bytes > 2 * CONTEXT * 48 * 4
    assert not any(".layer." in name for name in found.state_bytes)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3", "llama4", "qwen3_moe", "deepseek_v3", "qwen2"])
@pytest.mark.parametrize("tokens", [100, 500])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_formula_is_near_what_the_code_takes(name: str, batch: int, tokens: int) -> None:
    workload = Workload(batch=batch, context=tokens)
    by_code, by_formula = (needs_of(model, workload) for model in (make(name, torch.bfloat16, "meta"), names_only(name)))
    assert "estimated by formula" in by_formula.notes[0]
    assert 0.85 * by_code.workspace_bytes <= by_formula.workspace_bytes <= 1.5 * by_code.workspace_bytes


@pytest.mark.parametrize("known", ["code", "names"])
def test_the_head_keeps_room_for_the_logits(known: str) -> None:
    large = {"vocab_size": 8000}
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT | large)).to(torch.bfloat16)
    if known == "names":
        tree = skeleton({key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()})
        tree.config = model.config.to_dict()
        model = tree
    every = needs_of(model, Workload(context=CONTEXT))
    last = needs_of(model, Workload(context=CONTEXT, logits="last"))
    logits_bytes = CONTEXT * 8000 * 2
    assert logits_bytes <= every.state_bytes["lm_head"] + every.workspace_bytes <= 1.4 * logits_bytes
    assert any("logits='last'" in note for note in every.notes)
    assert last.state_bytes.get("lm_head", 0) + last.workspace_bytes < 0.5 * logits_bytes
    assert not any("logits" in note for note in last.notes)


def test_a_model_that_says_nothing_of_itself_gets_a_note() -> None:
    found = needs_of(Decoder(), Workload(context=CONTEXT))
    assert found.state_bytes == {}
    assert "Nothing is reserved for activations" in found.notes[0]
    assert "Nothing is reserved for the KV cache" in found.notes[1]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows).relu()
        return rows


def test_example_inputs_stand_in_for_tokens() -> None:
    found = needs_of(Plain(), Workload(example_inputs=torch.empty(1000, 64, device="meta")))
    assert found.state_bytes == {}
    rows_bytes = 1000 * 64 * 4
    # Those that the model is called with, those that a block takes, what it gives, and what is made of that.
    assert 4 * rows_bytes <= found.workspace_bytes <= 4.1 * rows_bytes
    assert needs_of(Plain(), Workload(example_inputs=torch.empty(1000, 64)), torch.float16).workspace_bytes < 0.55 * found.workspace_bytes


def test_text_models_inside_others_keep_their_cache_in_their_own_blocks() -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=dict(TEXT, head_dim=8, sliding_window=6, query_pre_attn_scalar=8), vision_config=vision, mm_tokens_per_image=4
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    tree = skeleton({key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in model.state_dict().items()})
    tree.config = json.loads(config.to_json_string())
    for known in (model, tree):
        cached = [name for name in needs_of(known, Workload(context=CONTEXT)).state_bytes if ".layers." in name]
        assert [name.rpartition("layers.")[2] for name in cached] == ["0", "1", "2", "3"]
        assert all("language_model" in name for name in cached)


def test_blocks_that_the_caller_cuts_smaller_still_have_their_cache() -> None:
    model = make("llama", device="meta")
    found = plan(model, {0: "1GiB"}, context=CONTEXT, no_split_module_classes=["LlamaAttention", "LlamaMLP"])
    assert found.devices[0].state_bytes >= sum(held("llama", 1, CONTEXT, 4))


def test_a_plan_keeps_the_needs_of_what_runs_on_each_device() -> None:
    model = make("llama", torch.float32, "meta")
    needs = needs_of(model, Workload(batch=2, context=CONTEXT))
    found = plan(model, {0: "1GiB", 1: "1GiB"}, batch=2, context=CONTEXT)
    assert [use.workspace_bytes for use in found.devices[:2]] == 2 * [needs.workspace_bytes]
    assert sum(use.state_bytes for use in found.devices) == sum(needs.state_bytes.values())
    layers = [sum(name.startswith("model.layers") for name in use.contents) for use in found.devices[:2]]
    assert sum(layers) == 4
    assert [use.state_bytes for use in found.devices[:2]] == [count * held("llama", 2, CONTEXT, 4)[0] for count in layers]


def test_packed_weights_have_room_to_be_unpacked_one_at_a_time() -> None:
    config = transformers.LlamaConfig(**TEXT | {"hidden_size": 128, "intermediate_size": 320})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    plain, packed = (plan(model, {0: ROOM}, context=CONTEXT, weight_format=packing) for packing in (None, weight_format("nf4")))
    assert packed.devices[0].resident_bytes < plain.devices[0].resident_bytes
    assert packed.devices[0].workspace_bytes == plain.devices[0].workspace_bytes + 128 * 320 * 2
    assert plan(model, {0: ROOM}, weight_format=weight_format("nf4")).devices[0].workspace_bytes == 0


def test_a_run_that_fits_nowhere_is_refused_with_what_it_takes() -> None:
    model = make("llama", device="meta")
    needs = needs_of(model, Workload(batch=50, context=CONTEXT))
    run_bytes = sum(needs.state_bytes.values()) + needs.workspace_bytes
    with pytest.raises(PlanError, match=r"for the run.*smaller batch or context") as caught:
        plan(model, {0: run_bytes // 2, "cpu": run_bytes // 2}, batch=50, context=CONTEXT)
    assert int(str(caught.value).split(" bytes to pass")[0].rpartition(" ")[2].replace(",", "")) > run_bytes
    assert plan(model, {0: run_bytes // 2, "cpu": run_bytes // 2}, batch=10, context=CONTEXT).main_device == 0


def test_needs_are_measured_once_for_all_that_a_plan_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    measured = needs_module.dry_run
    monkeypatch.setattr(needs_module, "dry_run", lambda *arguments, **options: calls.append(1) or measured(*arguments, **options))
    plan(make("llama", device="meta"), {0: 300_000, "cpu": "1GiB"}, context=CONTEXT, advice=False)
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"context": 0}, {"batch": True}, {"context": 1.5}, {"logits": "none"}])
def test_workloads_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        Workload(**wrong)


def test_the_cache_of_18_000_matrices_is_found_without_looking_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: dict[str, TensorSpec] = {}
    for layer in range(60):
        for expert in range(100):
            for matrix in ("gate", "up", "down"):
                specs[f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"] = TensorSpec((2048, 7168), torch.bfloat16)
    tree = skeleton(specs)
    tree.config = dict(config_of("deepseek_v3").to_dict(), num_hidden_layers=60)
    seen: list[str] = []
    around_layers = needs_module._around_layers

    def counted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, module in around_layers(model):
            seen.append(name)
            yield name, module

    monkeypatch.setattr(needs_module, "_around_layers", counted)
    found = needs_of(tree, Workload(context=CONTEXT))
    assert set(seen) == {"", "model", "model.layers"}
    assert len(cache_of(found, "model.layers")) == 60


def test_of_packed_experts_two_matrices_are_unpacked_and_of_packed_tables_no_more_than_rows() -> None:
    config = transformers.Qwen3MoeConfig(**TEXT | {"vocab_size": 4096, "moe_intermediate_size": 640, "num_experts": 8, "head_dim": 8})
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    matrix = 2 * 640 * config.hidden_size
    plain, *packed = (
        plan(model, {0: ROOM}, context=CONTEXT, weight_format=packing)
        for packing in (None, FourBit("nf4", skip_modules=("lm_head",)), FourBit("nf4", skip_modules=("lm_head",), embeddings=True))
    )
    assert packed[1].devices[0].resident_bytes < packed[0].devices[0].resident_bytes
    assert [each.devices[0].workspace_bytes - plain.devices[0].workspace_bytes for each in packed] == [2 * matrix * 2] * 2
