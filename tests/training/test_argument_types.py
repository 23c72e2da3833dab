"""Arguments of the wrong type: refused where they are given, by name, with what is taken."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy
import pytest
from torch import nn

from bigmodel.errors import TrainingError, WrongTypeError
from bigmodel.text import kind_text
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.configuration import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration, TorchDynamoPlugin
from bigmodel.training.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from bigmodel.training.plugins.deepspeed import DeepSpeedPlugin
from bigmodel.training.plugins.fsdp import FullyShardedDataParallelPlugin
from bigmodel.training.plugins.megatron import MegatronLMPlugin
from bigmodel.training.state import PartialState


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Accelerator, {"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps='4'): it takes a whole number, not a str."),
        (Accelerator, {"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps=2.5): it takes a whole number, not a float."),
        (Accelerator, {"gradient_accumulation_steps": True}, "gradient_accumulation_steps=True): it takes a whole number, not a bool."),
        (Accelerator, {"device_placement": "yes"}, "device_placement='yes'): it takes True or False, not a str."),
        (Accelerator, {"mixed_precision": 16}, "mixed_precision=16): it takes a PrecisionType, a str or None, not an int."),
        (
            Accelerator,
            {"dataloader_config": {"split_batches": True}},
            "dataloader_config={'split_batches': True}): it takes a DataLoaderConfiguration or None, not a dict.",
        ),
        (Accelerator, {"project_dir": 3}, "project_dir=3): it takes a str, a PathLike or None, not an int."),
        (Accelerator, {"kwargs_handlers": AutocastKwargs()}, "it takes a list or None, not an AutocastKwargs."),
        (Accelerator, {"rng_types": "torch"}, "rng_types='torch'): it takes a list or None, not a str."),
        (Accelerator, {"dynamo_plugin": "inductor"}, "dynamo_plugin='inductor'): it takes a TorchDynamoPlugin or None, not a str."),
        (PartialState, {"cpu": "yes"}, "cpu='yes'): it takes True or False, not a str."),
        (PartialState, {"timeout": 30}, "timeout=30): it takes a timedelta or None, not an int."),
        (GradientAccumulationPlugin, {"num_steps": "4"}, "num_steps='4'): it takes a whole number or None, not a str."),
        (GradientAccumulationPlugin, {"adjust_scheduler": "no"}, "adjust_scheduler='no'): it takes True or False, not a str."),
        (TorchDynamoPlugin, {"fullgraph": "no"}, "fullgraph='no'): it takes True, False or None, not a str."),
        (DataLoaderConfiguration, {"data_seed": "1"}, "data_seed='1'): it takes a whole number or None, not a str."),
        (DataLoaderConfiguration, {"split_batches": None}, "split_batches=None): it takes True or False, not None."),
        (ProjectConfiguration, {"total_limit": "3"}, "total_limit='3'): it takes a whole number or None, not a str."),
        (AutocastKwargs, {"enabled": "no"}, "enabled='no'): it takes True or False, not a str."),
        (GradScalerKwargs, {"init_scale": "big"}, "init_scale='big'): it takes a number, not a str."),
        (GradScalerKwargs, {"growth_interval": 10.5}, "growth_interval=10.5): it takes a whole number, not a float."),
        (InitProcessGroupKwargs, {"timeout": 30}, "timeout=30): it takes a timedelta or None, not an int."),
        (DistributedDataParallelKwargs, {"bucket_cap_mb": "25"}, "bucket_cap_mb='25'): it takes a whole number, not a str."),
        (DistributedDataParallelKwargs, {"comm_state_option": [1]}, "comm_state_option=[1]): it takes a dict, not a list."),
        (ProfileKwargs, {"activities": "cpu"}, "activities='cpu'): it takes a list or None, not a str."),
        (ProfileKwargs, {"on_trace_ready": 1}, "on_trace_ready=1): it takes a function or None, not an int."),
        (FullyShardedDataParallelPlugin, {"fsdp_version": "2"}, "fsdp_version='2'): it takes a whole number or None, not a str."),
        (
            FullyShardedDataParallelPlugin,
            {"activation_checkpointing": "no"},
            "activation_checkpointing='no'): it takes True, False",
        ),
        (DeepSpeedPlugin, {"zero_stage": "2"}, "zero_stage='2'): it takes a whole number or None, not a str."),
        (MegatronLMPlugin, {"tp_degree": "2"}, "tp_degree='2'): it takes a whole number or None, not a str."),
    ],
)
def test_the_wrong_type_is_refused_by_name(make: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongTypeError) as refused:
        make(**arguments)
    text = str(refused.value)
    assert text.startswith(f"{make.__name__}({next(iter(arguments))}=")
    assert message in text
    assert isinstance(refused.value, TypeError)


def test_numbers_of_other_libraries_and_truths_as_numbers_do() -> None:
    assert GradientAccumulationPlugin(num_steps=numpy.int64(4)).num_steps == 4
    assert GradScalerKwargs(init_scale=numpy.float32(4), growth_factor=3).growth_factor == 3
    assert AutocastKwargs(enabled=0).enabled == 0  # `str_to_bool` of some libraries
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).timeout == timedelta(seconds=5)


def test_a_later_change_is_looked_at_as_well() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(WrongTypeError, match="gradient_accumulation_steps='4': it takes a whole number, not a str"):
        accelerator.gradient_accumulation_steps = "4"  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="gradient_accumulation_steps=0: gradients of at least 1 batch"):
        accelerator.gradient_accumulation_steps = 0
    assert accelerator.gradient_accumulation_steps == 3


def test_too_few_steps_are_told_under_the_arguments_name() -> None:
    with pytest.raises(TrainingError, match="gradient_accumulation_steps=0"):
        Accelerator(cpu=True, gradient_accumulation_steps=0)


def test_variables_that_are_no_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "two")
    with pytest.raises(TrainingError, match="FSDP_VERSION is 'two', not a whole number"):
        FullyShardedDataParallelPlugin()


def test_plugins_of_another_kind_have_their_articles() -> None:
    with pytest.raises(TrainingError, match="fsdp_plugin takes a FullyShardedDataParallelPlugin, not an int"):
        Accelerator(cpu=True, fsdp_plugin=3)


class MLP(nn.Module):
    pass


@pytest.mark.parametrize(
    ("thing", "text"),
    [(3, "an int"), ("", "a str"), (None, "None"), (MLP(), "an MLP"), (nn.LSTM, "an LSTM"), (nn.GRU, "a GRU"), (object, "an object")],
)
def test_types_have_their_articles(thing: object, text: str) -> None:
    assert kind_text(thing) == text
