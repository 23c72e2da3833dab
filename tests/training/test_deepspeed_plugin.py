"""What DeepSpeed is told: arguments, config and environment, joined; differences named with both values."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigmodel import DeepSpeedPlugin, TrainingError
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.config_file import LaunchSettings, launch_environment
from bigmodel.training.plugins.deepspeed_config import HfDeepSpeedConfig

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.01}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "fp16": {"enabled": False},
}


# The config object


def test_a_config_is_asked_by_dotted_names() -> None:
    config = HfDeepSpeedConfig(CONFIG)
    assert config.get_value("zero_optimization.stage") == 3
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("zero_optimization.offload_optimizer.device") is None
    assert config.get_value("nothing.like.it", 7) == 7
    assert config.get_value("fp16.enabled.deeper", 7) == 7
    assert config.find_config_node("optimizer.params.lr") == (config.config["optimizer"]["params"], "lr")
    assert config.find_config_node("scheduler.params.lr") == (None, "lr")


def test_yes_no_and_nothing_said_are_three_answers() -> None:
    config = HfDeepSpeedConfig(CONFIG)
    assert [config.is_true(name) for name in ("optimizer", "fp16.enabled", "bf16.enabled")] == [True, False, False]
    assert [config.is_false(name) for name in ("optimizer", "fp16.enabled", "bf16.enabled")] == [False, True, False]


@pytest.mark.parametrize(
    ("zero", "answers"),
    [
        ({"stage": 3, "offload_param": {"device": "cpu"}}, (False, True, True)),
        ({"stage": 3, "offload_param": {"device": "none"}}, (False, True, False)),
        ({"stage": 3}, (False, True, False)),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, (True, False, True)),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, (False, False, False)),
        ({}, (False, False, False)),
    ],
)
def test_stage_and_offload(zero: dict[str, Any], answers: tuple[bool, bool, bool]) -> None:
    config = HfDeepSpeedConfig({"zero_optimization": zero})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == answers


def test_values_are_set_and_taken_out() -> None:
    config = HfDeepSpeedConfig({"fp16": {"enabled": True}})
    config.set_value("zero_optimization.offload_param.device", "cpu")
    config.set_value("fp16.enabled", False)
    assert config.config == {"fp16": {"enabled": False}, "zero_optimization": {"offload_param": {"device": "cpu"}}}
    config.del_config_sub_tree("zero_optimization.offload_param")
    config.del_config_sub_tree("not.there")
    assert config.config == {"fp16": {"enabled": False}, "zero_optimization": {}}
    with pytest.raises(TrainingError, match=r"no 'fp16.loss_scale' to take out; it has fp16.enabled"):
        config.del_config_sub_tree("fp16.loss_scale", must_exist=True)


def test_a_config_comes_from_a_dict_a_file_or_base64(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(CONFIG))
    for where in (CONFIG, file, str(file), base64.b64encode(json.dumps(CONFIG).encode()).decode()):
        assert HfDeepSpeedConfig(where).config == CONFIG
    assert HfDeepSpeedConfig(CONFIG).config["optimizer"] is not CONFIG["optimizer"]


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no DeepSpeed config '/no/where\.json'"):
        HfDeepSpeedConfig("/no/where.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(TrainingError, match=r"list\.json' is a list in JSON"):
        HfDeepSpeedConfig(tmp_path / "list.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(TrainingError, match=r"half\.json' is no JSON: .*line 1"):
        HfDeepSpeedConfig(tmp_path / "half.json")


# Arguments, config and environment


def test_without_a_config_the_fields_make_one() -> None:
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4, gradient_clipping=0.5, zero_stage=3, offload_param_device="cpu")
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "cpu", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
    }
    assert plugin.zero3_init_flag is True
    assert DeepSpeedPlugin().zero_stage == 2
    assert DeepSpeedPlugin().zero3_init_flag is False


@pytest.mark.parametrize("prefix", ["BIGMODEL_", "ACCELERATE_"])
def test_the_environment_says_what_arguments_do_not(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in {
        "GRADIENT_ACCUMULATION_STEPS": "3",
        "GRADIENT_CLIPPING": "0.25",
        "DEEPSPEED_ZERO_STAGE": "3",
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/drive",
        "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "DEEPSPEED_ZERO3_INIT": "false",
        "DEEPSPEED_MOE_LAYER_CLS_NAMES": "Experts,MoreExperts",
    }.items():
        monkeypatch.setenv(prefix + name, word)
    plugin = DeepSpeedPlugin(gradient_clipping=1.0)
    assert (plugin.gradient_accumulation_steps, plugin.gradient_clipping, plugin.zero_stage) == (3, 1.0, 3)
    assert plugin.get_value("zero_optimization.offload_optimizer") == {"device": "cpu", "nvme_path": None}
    assert plugin.get_value("zero_optimization.offload_param") == {"device": "nvme", "nvme_path": "/drive"}
    assert plugin.zero3_save_16bit_model is True
    assert plugin.zero3_init_flag is False
    assert plugin.transformer_moe_cls_names == "Experts,MoreExperts"


def test_what_launch_sets_is_what_the_plugin_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(CONFIG))
    for settings, stage, steps in (
        ({"zero_stage": 1, "gradient_accumulation_steps": 2, "offload_optimizer_device": "none", "zero3_init_flag": False}, 1, 2),
        ({"deepspeed_config_file": str(file), "zero3_init_flag": True}, 3, "auto"),
    ):
        with monkeypatch.context() as scope:
            for name, word in launch_environment(LaunchSettings(distributed_type="DEEPSPEED", deepspeed_config=settings)).items():
                scope.setenv(name, word)
            plugin = DeepSpeedPlugin()
        assert (plugin.zero_stage, plugin.gradient_accumulation_steps) == (stage, steps)
        assert plugin.zero3_init_flag is settings["zero3_init_flag"]


def test_a_config_decides_what_it_says_and_leaves_the_rest() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG, gradient_accumulation_steps=2)
    assert plugin.zero_stage == 3
    assert plugin.offload_param_device == "cpu"
    assert plugin.get_value("gradient_accumulation_steps") == 2
    assert plugin.get_value("zero_optimization.offload_optimizer") is None
    assert CONFIG["gradient_accumulation_steps"] == "auto"  # the user's dict is not written to
    mine = HfDeepSpeedConfig(CONFIG)
    assert DeepSpeedPlugin(hf_ds_config=mine).hf_ds_config is mine


def test_arguments_that_a_config_lacks_become_part_of_it() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}}, gradient_clipping=0.5, offload_optimizer_device="cpu")
    assert plugin.get_value("gradient_clipping") == 0.5
    assert plugin.get_value("zero_optimization.offload_optimizer.device") == "cpu"
    assert plugin.get_value("gradient_accumulation_steps") == "auto"


def test_an_argument_that_differs_from_the_config_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match=r"zero_stage=2, but zero_optimization\.stage is 3 in the config"):
        DeepSpeedPlugin(hf_ds_config=CONFIG, zero_stage=2)
    monkeypatch.setenv("BIGMODEL_DEEPSPEED_ZERO_STAGE", "1")
    with pytest.raises(TrainingError, match=r"zero_stage \(environment\)=1, but zero_optimization\.stage is 3"):
        DeepSpeedPlugin(hf_ds_config=CONFIG)
    monkeypatch.setenv("BIGMODEL_DEEPSPEED_ZERO_STAGE", "3")
    assert DeepSpeedPlugin(hf_ds_config=CONFIG).zero_stage == 3


def test_settings_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, story in (
        ({"zero_stage": 4}, r"ZeRO stage 4: there are 0, 1, 2 and 3"),
        ({"offload_param_device": "cpu"}, r"offload_param_device='cpu' is for ZeRO stage 3, not 2"),
        ({"offload_optimizer_device": "disk"}, r"offload_optimizer_device='disk'; use 'none', 'cpu' or 'nvme'"),
        ({"offload_optimizer_device": "nvme"}, r"needs offload_optimizer_nvme_path"),
        ({"hf_ds_config": {"fp16": {}}}, r"no 'zero_optimization'"),
        ({"enable_msamp": True, "zero_stage": 3}, r"enable_msamp is for ZeRO stages 0 to 2"),
        ({"enable_msamp": True, "msamp_opt_level": "O3"}, r"msamp_opt_level='O3'"),
    ):
        with pytest.raises(TrainingError, match=story):
            DeepSpeedPlugin(**arguments)
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "much")
    with pytest.raises(TrainingError, match=r"GRADIENT_CLIPPING is 'much', not a number"):
        DeepSpeedPlugin()


def test_building_sharded_is_for_stage_3() -> None:
    with pytest.warns(UserWarning, match="no effect with stage 2"):
        assert DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).is_zero3_init_enabled() is False


# Values that are found out later


def test_auto_values_are_filled_by_their_dotted_names() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    values = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "optimizer.params.lr": 1e-3,
        "optimizer.params.betas": (0.9, 0.95),
        "zero_optimization.reduce_bucket_size": 4096,
        "not.in.the.config": 1,
    }
    plugin.deepspeed_config_process(**values)
    assert plugin.deepspeed_config["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01}
    assert plugin.get_value("zero_optimization.reduce_bucket_size") == 4096
    assert plugin.get_value("not.in.the.config") is None
    assert not any(plugin.is_auto(name) for name in values)


def test_every_auto_without_a_value_is_named() -> None:
    story = r"'auto' for train_micro_batch_size_per_gpu, gradient_accumulation_steps, zero_optimization\.reduce_bucket_size,"
    with pytest.raises(TrainingError, match=story):
        DeepSpeedPlugin(hf_ds_config=CONFIG).deepspeed_config_process(**{"optimizer.params.lr": 1e-3})


def test_every_value_that_differs_is_named_with_both() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": 8, "fp16": {"enabled": False}, "zero_optimization": {"stage": 1}})
    plugin.deepspeed_config["gradient_accumulation_steps"] = 2
    values = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "fp16.enabled": True}
    with pytest.raises(TrainingError) as caught:
        plugin.deepspeed_config_process(**values)
    assert "train_batch_size is 8 in the config and 16 in the script; fp16.enabled is False in the config and True" in str(caught.value)
    assert "gradient_accumulation_steps" not in str(caught.value)
    plugin.deepspeed_config_process(must_match=False, **values)
    found: list[str] = []
    plugin.deepspeed_config_process("fp16.", found, plugin.deepspeed_config["fp16"], **values)
    assert found == ["fp16.enabled is False in the config and True in the script"]


@pytest.mark.parametrize(
    ("precision", "there", "enabled"),
    [
        ("no", {}, {"fp16": False, "bf16": False}),
        ("bf16", {}, {"fp16": False, "bf16": True}),
        ("fp16", {}, {"fp16": True, "bf16": False}),
        ("bf16", {"bf16": {"enabled": "auto"}}, {"fp16": False, "bf16": True}),
        ("no", {"bf16": {"enabled": True}}, {"fp16": False, "bf16": True}),
        ("bf16", {"bf16": {"enabled": True}}, {"fp16": False, "bf16": True}),
    ],
)
def test_the_precision_goes_into_the_config(precision: str, there: dict[str, Any], enabled: dict[str, bool]) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **there})
    plugin.set_mixed_precision(precision)
    assert {word: plugin.deepspeed_config[word]["enabled"] for word in ("fp16", "bf16")} == enabled


def test_two_precisions_are_refused() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}})
    with pytest.raises(TrainingError, match=r"mixed_precision='bf16', but bf16\.enabled is False"):
        plugin.set_mixed_precision("bf16")


# Which plugin is in use


def test_a_plugin_is_selected_by_its_name() -> None:
    first, second = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
    with pytest.raises(TrainingError, match=r"select_deepspeed_plugin\(name\)"):
        first.select()
    try:
        state = AcceleratorState(deepspeed_plugin={"first": first, "second": second}, cpu=True)
        assert (first.selected, second.selected) == (True, False)
        state.select_deepspeed_plugin("second")
        assert (first.selected, second.selected) == (False, True)
        assert state.deepspeed_plugin is second
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_transformers_knows_the_selected_plugin_and_builds_sharded_where_asked() -> None:
    modeling = pytest.importorskip("transformers.integrations.deepspeed")
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.select(_from_accelerator_state=True)
    assert modeling.is_deepspeed_zero3_enabled()
    told = modeling.deepspeed_config()
    assert told["train_micro_batch_size_per_gpu"] == told["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in told  # nothing in it is "auto"
    with plugin.zero3_init_context_manager(enable=False):
        assert not modeling.is_deepspeed_zero3_enabled()
    assert modeling.is_deepspeed_zero3_enabled()
    plugin._unselect()
    assert not modeling.is_deepspeed_zero3_enabled()
    late = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    late.select(_from_accelerator_state=True)
    assert not modeling.is_deepspeed_zero3_enabled()
    with late.zero3_init_context_manager(enable=True):
        assert modeling.is_deepspeed_zero3_enabled()
    assert not modeling.is_deepspeed_zero3_enabled()


def test_importing_the_plugin_imports_no_engine() -> None:
    code = "import bigmodel, sys; assert not {'deepspeed', 'megatron', 'transformers.integrations'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
