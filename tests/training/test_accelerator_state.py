"""The settings of training: made once, checked, changed only by a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bigmodel.errors import TrainingError
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.enums import DistributedType
from bigmodel.training.state import PartialState


@dataclass
class Plugin:
    told: str | None = None
    fsdp_version: int = 2
    size: int = 1

    def set_mixed_precision(self, mixed_precision: str) -> None:
        self.told = mixed_precision


@dataclass(eq=False)
class DeepSpeed:
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    selected: bool = False

    def set_mixed_precision(self, mixed_precision: str) -> None:
        if mixed_precision in ("fp16", "bf16"):
            self.deepspeed_config.setdefault(mixed_precision, {"enabled": True})

    def select(self, _from_accelerator_state: bool = False) -> None:
        assert _from_accelerator_state
        self.selected = True

    def _unselect(self) -> None:
        self.selected = False


def test_alone_it_is_the_process_without_plugins() -> None:
    state = AcceleratorState()
    assert state.initialized
    assert (state.num_processes, state.process_index, state.device) == (1, 0, torch.device("cpu"))
    assert state.is_main_process
    assert state.distributed_type == DistributedType.NO
    assert state.mixed_precision == "no"
    assert (state.dynamo_plugin, state.fsdp_plugin, state.megatron_lm_plugin, state.deepspeed_plugin, state.deepspeed_plugins) == (
        None,
    ) * 5
    assert state.is_fsdp2 is False
    assert repr(state).endswith("Mixed precision type: no\n")


def test_a_partial_state_is_not_yet_one() -> None:
    PartialState()
    assert PartialState().initialized
    assert "_mixed_precision" not in PartialState._shared_state
    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"
    AcceleratorState._reset_state()
    assert PartialState().initialized
    assert AcceleratorState().mixed_precision == "no"


def test_precisions_are_known_words() -> None:
    with pytest.raises(TrainingError, match=r"mixed_precision is 'bf17'; use one of \['no', 'fp8', 'fp16', 'bf16'\]"):
        AcceleratorState(mixed_precision="bf17")
    assert AcceleratorState(mixed_precision="BF16").mixed_precision == "bf16"


def test_the_environment_says_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert AcceleratorState().mixed_precision == "fp16"
    AcceleratorState._reset_state()
    monkeypatch.setenv("BIGMODEL_MIXED_PRECISION", "bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    AcceleratorState._reset_state()
    assert AcceleratorState(mixed_precision="no").mixed_precision == "no"
    AcceleratorState._reset_state()
    monkeypatch.setenv("BIGMODEL_MIXED_PRECISION", "half")
    with pytest.raises(TrainingError, match="BIGMODEL_MIXED_PRECISION is 'half'"):
        AcceleratorState()


def test_settings_that_differ_later_are_refused_by_name() -> None:
    plugin = Plugin()
    AcceleratorState(mixed_precision="bf16", fsdp_plugin=plugin)
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState(mixed_precision="bf16", fsdp_plugin=plugin).fsdp_plugin is plugin
    assert AcceleratorState(fsdp_plugin=Plugin()).fsdp_plugin is plugin, "an equal one is no change"
    with pytest.raises(TrainingError, match="mixed_precision='no': this process trains with 'bf16'"):
        AcceleratorState(mixed_precision="no")
    with pytest.raises(TrainingError, match=r"fsdp_plugin=Plugin\(.*size=2\)"):
        AcceleratorState(fsdp_plugin=Plugin(size=2))
    with pytest.raises(TrainingError, match="dynamo_plugin='inductor': this process trains with None"):
        AcceleratorState(dynamo_plugin="inductor")
    with pytest.raises(TrainingError, match="megatron_lm_plugin="):
        AcceleratorState(megatron_lm_plugin=Plugin())
    with pytest.raises(TrainingError, match="deepspeed_plugins="):
        AcceleratorState(deepspeed_plugin=DeepSpeed())


@pytest.mark.parametrize(("name", "kind"), [("fsdp_plugin", DistributedType.FSDP), ("megatron_lm_plugin", DistributedType.MEGATRON_LM)])
def test_a_plugin_names_the_kind_of_training(name: str, kind: DistributedType) -> None:
    plugin = Plugin()
    state = AcceleratorState(mixed_precision="bf16", **{name: plugin})
    assert state.distributed_type == kind
    assert PartialState().distributed_type == kind
    assert getattr(state, name) is plugin
    assert plugin.told == "bf16"
    assert state.is_fsdp2 is (name == "fsdp_plugin")
    assert state.use_distributed is False
    state.wait_for_everyone()
    AcceleratorState._reset_state()
    assert PartialState().distributed_type == DistributedType.NO


def test_a_policy_of_the_fsdp_plugin_stays_without_mixed_precision() -> None:
    plugin = Plugin(fsdp_version=1)
    assert AcceleratorState(fsdp_plugin=plugin).is_fsdp2 is False
    assert plugin.told is None


def test_two_engines_exclude_each_other() -> None:
    with pytest.raises(TrainingError, match="FSDP and MEGATRON_LM cannot train one model together"):
        AcceleratorState(fsdp_plugin=Plugin(), megatron_lm_plugin=Plugin())
    assert not AcceleratorState._shared_state.get("_mixed_precision")


def test_deepspeed_plugins_are_selected_by_name() -> None:
    student, teacher = DeepSpeed(), DeepSpeed({"fp16": {"enabled": True}})
    state = AcceleratorState(mixed_precision="bf16", deepspeed_plugin={"student": student, "teacher": teacher})
    assert state.distributed_type == DistributedType.DEEPSPEED
    assert state.deepspeed_plugin is student
    assert (student.selected, teacher.selected) == (True, False)
    assert state.mixed_precision == "bf16"
    state.select_deepspeed_plugin("teacher")
    assert AcceleratorState().deepspeed_plugin is teacher
    assert (student.selected, teacher.selected) == (False, True)
    assert state.mixed_precision == "fp16", "the selected config says so"
    assert state.get_deepspeed_plugin("student") is student
    with pytest.raises(TrainingError, match=r"no DeepSpeed plugin 'judge'; there are \['student', 'teacher'\]"):
        state.select_deepspeed_plugin("judge")


def test_one_deepspeed_plugin_is_the_default() -> None:
    plugin = DeepSpeed()
    state = AcceleratorState(deepspeed_plugin=plugin)
    assert state.deepspeed_plugins == {"default": plugin}
    assert state.deepspeed_plugin is plugin
    assert plugin.selected
    assert state.mixed_precision == "no"


def test_without_deepspeed_there_is_no_plugin_to_select() -> None:
    with pytest.raises(TrainingError, match="no DeepSpeed plugin 'x'"):
        AcceleratorState().select_deepspeed_plugin("x")


def test_it_computes_on_the_accelerator_unless_told_otherwise(accelerators: Any) -> None:
    devices = accelerators(2)
    assert AcceleratorState().device == devices[0]
    with pytest.raises(TrainingError, match="already computes on sim:0"):
        AcceleratorState(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert AcceleratorState(cpu=True).device == torch.device("cpu")
