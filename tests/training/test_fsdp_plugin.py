"""Settings of sharding: words of both versions, the environment, and what has no counterpart."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from bigmodel.errors import TrainingError
from bigmodel.training.accelerator_settings import spreading_plugins
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.config_file import LaunchSettings, launch_environment
from bigmodel.training.enums import DistributedType
from bigmodel.training.plugins.fsdp import FullyShardedDataParallelPlugin
from bigmodel.training.plugins.fsdp_units import ignored_modules, units_of

Plugin = FullyShardedDataParallelPlugin


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)


def test_defaults_are_version_ones_on_the_engine_of_version_two() -> None:
    plugin = Plugin()
    assert plugin.fsdp_version == 2
    assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert plugin.reshard_after_forward is True
    assert plugin.backward_prefetch is None
    assert plugin.mixed_precision_policy is None
    assert plugin.auto_wrap_policy is None
    assert plugin.cpu_offload == OffloadPolicy()
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.optim_state_dict_config == FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert (plugin.sync_module_states, plugin.cpu_ram_efficient_loading, plugin.activation_checkpointing) == (False, False, False)
    assert Plugin(fsdp_version=2).state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert Plugin() == Plugin(fsdp_version=1)


@pytest.mark.parametrize(
    ("given", "strategy", "reshard"),
    [
        ({"sharding_strategy": "full_shard"}, "FULL_SHARD", True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP", False),
        ({"sharding_strategy": 2}, "SHARD_GRAD_OP", False),
        ({"sharding_strategy": "4"}, "HYBRID_SHARD", True),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, "_HYBRID_SHARD_ZERO2", False),
        ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD", False),
        ({"reshard_after_forward": False}, "SHARD_GRAD_OP", False),
        ({"reshard_after_forward": "true"}, "FULL_SHARD", True),
        ({"reshard_after_forward": "HYBRID_SHARD"}, "HYBRID_SHARD", True),
        ({"reshard_after_forward": ShardingStrategy.SHARD_GRAD_OP}, "SHARD_GRAD_OP", False),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": True}, "HYBRID_SHARD", True),
    ],
)
def test_sharding_strategies_and_resharding_are_one_setting(given: dict[str, Any], strategy: str, reshard: bool) -> None:
    plugin = Plugin(**given)
    assert (plugin.sharding_strategy, plugin.reshard_after_forward) == (ShardingStrategy[strategy], reshard)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sharding_strategy": "HALF_SHARD"}, "sharding_strategy is 'HALF_SHARD'; use one of FULL_SHARD"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "FULL_SHARD means reshard_after_forward=True, not False"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "SHARD_GRAD_OP"}, "say different things"),
        ({"reshard_after_forward": True, "sharding_strategy": 7}, "sharding_strategy is 7"),
        ({"fsdp_version": 3}, "fsdp_version is 3"),
        ({"backward_prefetch": "BACKWARD_POST"}, "as BACKWARD_PRE says"),
        ({"backward_prefetch": "sometimes"}, "backward_prefetch is 'sometimes'; use one of BACKWARD_PRE"),
        ({"cpu_offload": "yes"}, "cpu_offload takes a bool, CPUOffload or CPUOffloadPolicy, not a str"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "FSDP2 has none. Use SHARDED_STATE_DICT"),
        ({"state_dict_type": "half"}, "state_dict_type is 'half'; use one of FULL_STATE_DICT"),
        (
            {"state_dict_config": ShardedStateDictConfig()},
            "state_dict_config is a ShardedStateDictConfig; FULL_STATE_DICT takes a FullState",
        ),
        ({"auto_wrap_policy": "big_ones"}, "auto_wrap_policy is 'big_ones'; use one of transformer_based_wrap"),
        ({"auto_wrap_policy": 7}, "auto_wrap_policy=7): it takes a str, a function or None"),
        ({"min_num_params": "many", "auto_wrap_policy": "size_based_wrap"}, "min_num_params='many'): it takes a whole number"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
        ({"mixed_precision_policy": "int8"}, "'int8' is no precision; use one of fp8, fp16, bf16, fp32"),
        ({"mixed_precision_policy": {"param_dtype": torch.int8}}, "torch.int8 is no precision"),
        ({"mixed_precision_policy": {"params": torch.bfloat16}}, "or a dict with param_dtype, reduce_dtype"),
        ({"mixed_precision_policy": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision_grads has no counterpart"),
        ({"mixed_precision_policy": 3}, "mixed_precision_policy is 3"),
    ],
)
def test_what_means_nothing_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        Plugin(**given)
    assert message in str(caught.value)


def test_prefetching_offload_and_what_changes_nothing() -> None:
    assert Plugin(backward_prefetch="backward_pre").backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert Plugin(backward_prefetch="NO_PREFETCH").backward_prefetch is None
    assert Plugin(cpu_offload=True).cpu_offload == CPUOffloadPolicy()
    assert Plugin(cpu_offload=CPUOffload(offload_params=True)).cpu_offload == CPUOffloadPolicy()
    assert Plugin(cpu_offload=CPUOffload(offload_params=False)).cpu_offload == OffloadPolicy()
    assert Plugin(cpu_offload=CPUOffloadPolicy(pin_memory=False)).cpu_offload == CPUOffloadPolicy(pin_memory=False)
    assert Plugin(use_orig_params=False, limit_all_gathers=False).fsdp_version == 2


def test_precision_policies_of_either_version(caplog: pytest.LogCaptureFixture) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert Plugin(mixed_precision_policy="bf16").mixed_precision_policy == half
    assert Plugin(mixed_precision_policy="fp8").mixed_precision_policy == half
    summed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": "fp32"}
    expected = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    assert Plugin(mixed_precision_policy=summed).mixed_precision_policy == expected
    assert Plugin(mixed_precision_policy=expected).mixed_precision_policy is expected
    with caplog.at_level(logging.WARNING):
        old = Plugin(mixed_precision_policy=MixedPrecision(torch.float16, torch.float32, torch.float16, cast_root_forward_inputs=False))
    assert old.mixed_precision_policy == MixedPrecisionPolicy(torch.float16, torch.float32, cast_forward_inputs=False)
    assert "buffer_dtype=torch.float16 is not used" in caplog.text


def test_the_accelerators_precision_counts_where_the_plugin_has_none() -> None:
    plugin = Plugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    plugin.set_mixed_precision(torch.float16, override=True)
    plugin.validate_mixed_precision_policy()
    assert plugin.mixed_precision_policy.param_dtype == torch.float16
    with pytest.raises(TrainingError, match="'fp4' is no precision"):
        plugin.set_mixed_precision("fp4")
    plugin.mixed_precision_policy = "bf16"
    with pytest.raises(TrainingError, match=r"not a torch\.distributed\.fsdp\.MixedPrecisionPolicy"):
        plugin.validate_mixed_precision_policy()
    state = AcceleratorState(cpu=True, mixed_precision="bf16", fsdp_plugin=Plugin())
    assert (state.distributed_type, state.is_fsdp2) == (DistributedType.FSDP, True)
    assert state.fsdp_plugin.mixed_precision_policy.param_dtype == torch.bfloat16


def test_the_state_dict_type_may_change_for_the_last_save() -> None:
    plugin = Plugin(state_dict_type="SHARDED_STATE_DICT")
    assert isinstance(plugin.state_dict_config, ShardedStateDictConfig)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    assert isinstance(plugin.state_dict_config, FullStateDictConfig)
    mine = FullStateDictConfig(rank0_only=False)
    assert Plugin(state_dict_type="full_state_dict", state_dict_config=mine).state_dict_config is mine


def test_the_environment_says_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "VERSION": "1",
        "SHARDING_STRATEGY": "2",
        "RESHARD_AFTER_FORWARD": "true",
        "OFFLOAD_PARAMS": "true",
        "BACKWARD_PREFETCH": "NO_PREFETCH",
        "STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "TRANSFORMER_CLS_TO_WRAP": "Block, Head",
        "FORWARD_PREFETCH": "true",
        "USE_ORIG_PARAMS": "false",
        "CPU_RAM_EFFICIENT_LOADING": "true",
        "ACTIVATION_CHECKPOINTING": "1",
        "IGNORED_MODULES": "norm.*",
    }
    for name, word in words.items():
        monkeypatch.setenv(f"FSDP_{name}", word)
    plugin = Plugin()
    assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert plugin.cpu_offload == CPUOffloadPolicy()
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]
    assert (plugin.forward_prefetch, plugin.sync_module_states, plugin.activation_checkpointing) == (True, True, True)
    assert plugin.ignored_modules == "norm.*"
    assert Plugin(cpu_ram_efficient_loading=False).cpu_ram_efficient_loading is False
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert Plugin().sharding_strategy is ShardingStrategy.FULL_SHARD
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "100")
    assert (Plugin().auto_wrap_policy, Plugin().min_num_params) == (size_based_auto_wrap_policy, 100)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "perhaps")
    with pytest.raises(TrainingError, match="FSDP_OFFLOAD_PARAMS: 'perhaps'"):
        Plugin()


def test_what_bigmodel_launch_sets_makes_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    config["fsdp_transformer_layer_cls_to_wrap"] = "Block"
    for name, word in launch_environment(LaunchSettings(distributed_type="FSDP", fsdp_config=config)).items():
        monkeypatch.setenv(name, word)
    found = spreading_plugins(False, deepspeed_plugin=None, fsdp_plugin=None, megatron_lm_plugin=None)
    assert found == {
        "fsdp_plugin": Plugin(
            sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    }
    assert found["fsdp_plugin"].reshard_after_forward is False


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def chosen(plugin: Plugin, model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in units_of(model, plugin, ignored_modules(model, plugin))]


def test_units_are_the_classes_the_sizes_or_what_a_function_says() -> None:
    model = Tied()
    assert chosen(Plugin(), model) == []
    assert chosen(Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]), model) == [
        "blocks.0",
        "blocks.1",
    ]
    assert chosen(Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block,LayerNorm"), model) == [
        "blocks.0.norm",
        "blocks.0",
        "blocks.1.norm",
        "blocks.1",
    ]
    assert chosen(Plugin(auto_wrap_policy="size_based_wrap", min_num_params=80), model) == ["blocks.0", "blocks.1"]
    assert chosen(Plugin(auto_wrap_policy="size_based_wrap", min_num_params=0), model) == []
    assert chosen(Plugin(auto_wrap_policy=ModuleWrapPolicy({nn.Linear})), model) == ["blocks.0.inner", "blocks.1.inner"]
    by_hand = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert chosen(Plugin(auto_wrap_policy=by_hand), model) == ["blocks.0", "blocks.1"]


def test_one_plugin_serves_models_of_different_classes_and_the_model_names_its_blocks() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap")
    model = Tied()
    model._no_split_modules = ["Block", "NotInThisOne"]  # type: ignore[assignment]
    assert chosen(plugin, model) == ["blocks.0", "blocks.1"]
    other = nn.Sequential(nn.Linear(2, 2))
    other._no_split_modules = ["Linear"]  # type: ignore[assignment]
    assert chosen(plugin, other) == ["0"]
    with pytest.raises(
        TrainingError, match="Sequential has no module of a class that transformer_cls_names_to_wrap would name; it has Linear"
    ):
        chosen(plugin, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TrainingError, match="Tied has no module of a class Blok; it has Block, Embedding"):
        chosen(Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block", "Blok"]), model)


def test_ignored_modules_by_name_and_by_object() -> None:
    model = Tied()
    wrapping: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    assert chosen(Plugin(ignored_modules=r"blocks\.0", **wrapping), model) == ["blocks.1"]
    plugin = Plugin(ignored_modules=iter([model.blocks[1].norm, model.blocks[1]]), **wrapping)
    assert ignored_modules(model, plugin) == [model.blocks[1]]
    assert chosen(plugin, model) == ["blocks.0"]
    for wanted, message in (
        ("block", "matches the whole name of no module of Tied"),
        ([nn.Linear(1, 1)], "holds Linear, which Tied"),
        ("", "whole model"),
    ):
        with pytest.raises(TrainingError, match=message):
            ignored_modules(model, Plugin(ignored_modules=wanted))
