"""Stages: what each part of a model computes and moves, read off the model, its plan and its config."""

from __future__ import annotations

import pytest
import torch
from planning_models import Decoder
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from bigmodel.planning.cost import Run, Stage
from bigmodel.planning.items import Travel, find_items, join_tied
from bigmodel.planning.sizes import tensor_bytes_rule
from bigmodel.planning.solver import assign
from bigmodel.planning.stages import facts_of, run_of, stages_of


def stages(model: nn.Module, budgets: dict[int | str, int], dtype: torch.dtype | None = None, state: dict[str, int] | None = None):
    inventory = find_items(model, tensor_bytes_rule(dtype))
    units = join_tied(inventory, Travel(offload_buffers=False), state)
    assignment = assign(units, budgets)
    facts = facts_of(model, inventory)
    run = run_of(facts, dtype, 1)
    places = {item.name: place for unit, place in zip(units, assignment.places, strict=True) for item in unit.items}
    found = stages_of(facts, inventory, places, assignment.main, offload_buffers=False, state_bytes=state)
    assert sum(stage.moved_bytes for stage in found) == assignment.moved_bytes
    return {stage.name: stage for stage in found}, run


def test_a_decoder_that_stays():
    found, run = stages(Decoder(2, width=16, vocabulary=64), {0: 10**6}, state={"layers.1": 500})
    assert list(found) == ["embed", "layers.0", "layers.1", "norm", "head"]
    assert run == Run("float32", 4)
    assert found["layers.0"] == Stage(
        "layers.0", 0, 0, weights=512, weight_bytes=2048, activation_width=64, calls=3, file_bytes=2048, loaded_bytes=2048
    )
    assert found["layers.1"].cache_bytes == 500
    assert (found["embed"].weights, found["embed"].row_bytes, found["embed"].calls) == (0, 0, 1)
    assert found["norm"].weights == 0  # a vector is no matrix
    assert (found["head"].weights, found["head"].activation_width) == (1024, 80)


def test_what_is_offloaded_moves_and_tables_give_rows():
    found, _ = stages(Decoder(10, width=16, vocabulary=64), {0: 8 * 2048, "cpu": 10**6}, torch.bfloat16)
    assert found["embed"].rests_on == found["embed"].runs_on or found["embed"].row_bytes == 32
    away = [stage for stage in found.values() if stage.rests_on == "cpu" and stage.name.startswith("layers")]
    assert all(stage.runs_on == 0 and stage.moved_bytes == stage.loaded_bytes == 1024 == stage.file_bytes // 2 for stage in away)


def test_a_tied_table_is_a_matrix_where_it_is_one():
    found, _ = stages(Decoder(2, tied=True), {0: 10**6})
    assert found["embed"].weights == 0
    assert found["head"].weights == 64 * 16


def llama(**changes: object) -> LlamaForCausalLM:
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, **changes}))


def test_a_llama():
    found, run = stages(llama(), {0: 10**7}, torch.bfloat16)
    assert run == Run("bfloat16", 2, hidden_width=32)
    layer = found["model.layers.0"]
    assert layer.weights == 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert layer.activation_width == 2 * 64 + 2 * 48 + 3 * 80
    assert layer.attention_width == 32
    assert found["lm_head"].attention_width == 0
    assert layer.calls == len(list(llama().model.layers[0].modules()))
    wide, _ = stages(llama(head_dim=16), {0: 10**7})
    assert wide["model.layers.0"].attention_width == 64


def test_routed_experts_are_told_apart():
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2))
    found, run = stages(model, {0: 10**7}, torch.bfloat16)
    assert (run.experts, run.experts_per_token) == (8, 2)
    layer = found["model.layers.0"]
    assert layer.expert_weights == 8 * 3 * 32 * 48
    assert layer.expert_bytes == 2 * layer.expert_weights
    assert layer.weights == 4 * 32 * 32 + 32 * 8  # attention and router


class Layer(nn.Module):
    """A router, and experts as a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])


class ListOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"num_experts": 4, "num_experts_per_tok": 1}
        with torch.device("meta"):
            self.layers = nn.ModuleList([Layer() for _ in range(2)])


def test_a_list_of_experts():
    found, _ = stages(ListOfExperts(), {0: 10**6})
    assert found["layers.0"].expert_weights == 4 * 64
    assert found["layers.0"].weights == 32
    assert found["layers.0"].activation_width == 12 + 16  # the router, and one of them


@pytest.mark.parametrize("config", [None, {"num_experts": 4}, {"num_experts": "4", "num_experts_per_tok": 8}])
def test_a_config_that_says_nothing_of_experts(config: object):
    model = ListOfExperts()
    model.config = config
    found, run = stages(model, {0: 10**6})
    assert run.experts == 0
    assert found["layers.0"].weights == 32 + 4 * 64


def test_the_dtype_of_the_arithmetic():
    def run(model: nn.Module, dtype: torch.dtype | str | None, batch: int = 1) -> Run:
        return run_of(facts_of(model, find_items(model, tensor_bytes_rule())), dtype, batch)

    assert run(llama(), "bfloat16").dtype == "bfloat16"
    assert run(llama(), None).dtype == "float32"
    assert run(llama().to(torch.float16), "int8", 3) == Run("float16", 2, batch=3, hidden_width=32)


class WithTensors(nn.Module):
    """Tensors beside modules: positions that are added, and a matrix that nobody wrapped into a module."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.zeros(4, 8))
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])


def test_tensors_of_inner_modules_are_stages_too():
    found, _ = stages(WithTensors(), {0: 10**6})
    assert list(found) == ["weight", "layers.0", "layers.1"]
    assert (found["weight"].weights, found["weight"].loaded_bytes) == (0, 4 * 8 * 4)
    assert found["layers.0"].weights == 64
