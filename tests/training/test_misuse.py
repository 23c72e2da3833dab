"""What users hand to a training loop by mistake: one error that names it and says what to give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from bigmodel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, debug_launcher, notebook_launcher
from bigmodel.data_loader import BatchSamplerShard
from bigmodel.errors import TrainingError, WrongTypeError
from bigmodel.state import AcceleratorState, GradientState, PartialState
from bigmodel.training.config_file import LaunchSettings
from bigmodel.training.plugins.fsdp_units import ignored_modules
from bigmodel.training.preparing import even_batches_set
from bigmodel.utils import find_executable_batch_size, is_port_in_use, set_seed


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


MISTAKES: list[tuple[Callable[[Accelerator], Any], str]] = [
    (lambda one: one.prepare_model("net"), r"prepare_model takes a model \(nn\.Module\), not a str"),
    (lambda one: one.prepare_model(nn.Linear), r"prepare_model takes a model \(nn\.Module\), not the class Linear"),
    (
        lambda one: one.prepare_optimizer(nn.Linear(1, 1)),
        r"prepare_optimizer takes an optimizer \(step, zero_grad, param_groups\), not a Linear",
    ),
    (lambda one: one.prepare_scheduler(None), r"prepare_scheduler takes a scheduler \(step\), not None"),
    (lambda one: one.prepare_data_loader([1, 2]), r"prepare_data_loader takes a DataLoader, not a list"),
    (lambda one: one.backward(1.5), "backward takes a loss that is a tensor, not a float"),
    (lambda one: one.backward(SimpleNamespace(loss=torch.ones(()))), "not a SimpleNamespace: give its `loss`"),
    (
        lambda one: one.clip_grad_norm_(nn.Linear(1, 1), 1.0),
        r"clip_grad_norm_ takes parameters, not a Linear: give `model\.parameters\(\)`",
    ),
    (lambda one: one.clip_grad_value_(None, 1.0), "clip_grad_value_ takes parameters, not None"),
    (lambda one: one.get_state_dict({"w": torch.ones(1)}), r"get_state_dict takes a model \(nn\.Module\), not a dict"),
    (lambda one: one.save_model("net", "folder"), r"save_model takes a model \(nn\.Module\), not a str"),
    (lambda one: one.log(0.5), r"log takes values by name, such as \{'loss': 0\.5\}, not a float"),
    (lambda one: one.init_trackers("run", config=[1]), "init_trackers takes a config of names and values, not a list"),
    (lambda one: notebook_launcher("train"), r"notebook_launcher\(function='train'\): it takes a function"),
    (lambda one: notebook_launcher(print, args="word"), r"notebook_launcher\(args='word'\): it takes a list"),
    (lambda one: debug_launcher(print, args=5), r"debug_launcher\(args=5\): it takes a list"),
    (lambda one: set_seed("a"), r"set_seed\(seed='a'\): it takes a whole number"),
    (lambda one: find_executable_batch_size(print, starting_batch_size="8"), r"find_executable_batch_size\(starting_batch_size='8'\)"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_the_wrong_kind_of_thing_is_named(accelerator: Accelerator, mistake: Callable[[Accelerator], Any], message: str) -> None:
    with pytest.raises(WrongTypeError, match=message):
        mistake(accelerator)


def test_too_many_arguments_with_a_batch_size_name_the_function() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, data: str) -> int:
        return batch_size

    assert train("data") == 4
    with pytest.raises(TypeError, match=r"Batch size was passed into `train`.*`train\(data\)`"):
        train(4, "data")
    with pytest.raises(TypeError, match=r"`train\(data\)` cannot be called so: too many positional arguments\. .*batch size"):
        train(4, "data", "more")
    with pytest.raises(TypeError, match=r"`train\(data\)` cannot be called so: missing a required argument: 'data'"):
        train()


def test_gradients_that_are_not_there_are_not_clipped(accelerator: Accelerator) -> None:
    layer = nn.Linear(2, 1)
    accelerator.clip_grad_value_(layer.parameters(), 0.5)
    accelerator.clip_grad_value_([], 0.5)
    layer.weight.grad = torch.tensor([[3.0, -0.1]])
    accelerator.clip_grad_value_(layer.parameters(), 0.5)
    assert layer.weight.grad.equal(torch.tensor([[0.5, -0.1]]))
    accelerator.clip_grad_value_(layer.weight, 0.25)
    assert layer.weight.grad.equal(torch.tensor([[0.25, -0.1]]))


@pytest.mark.parametrize("name", ["device", "num_processes", "mixed_precision", "distributed_type", "deepspeed_plugins", "is_main_process"])
def test_a_state_that_was_reset_says_so(accelerator: Accelerator, name: str) -> None:
    state = accelerator.state
    getattr(state, name)
    AcceleratorState._reset_state(True)
    with pytest.raises(
        AttributeError, match=rf"`AcceleratorState` object has no attribute .{name}.*This happens if `AcceleratorState\._reset_state\(\)`"
    ):
        getattr(state, name)


def test_preparing_after_a_reset_says_so(accelerator: Accelerator) -> None:
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match=r"`AcceleratorState` object has no attribute .*make an Accelerator"):
        accelerator.prepare(nn.Linear(1, 1))


def test_attributes_that_no_state_has_are_plain_errors(accelerator: Accelerator) -> None:
    for state in (accelerator.state, PartialState()):
        with pytest.raises(AttributeError, match=f"'{type(state).__name__}' object has no attribute 'colour'"):
            state.colour  # noqa: B018
        assert not hasattr(state, "colour")


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_loaders_that_cannot_be_set_uneven_are_told(accelerator: Accelerator) -> None:
    stream = accelerator.prepare(DataLoader(Numbers()))
    sharded = SimpleNamespace(batch_sampler=BatchSamplerShard(BatchSampler(range(5), 2, False), 2, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with even_batches_set([sharded], False), even_batches_set([stream], None):
            pass
    match = "even_batches=False is only supported for map-style datasets.*1 of 2"
    with pytest.warns(UserWarning, match=match), even_batches_set([stream, sharded], False):
        assert not sharded.batch_sampler.even_batches
    assert sharded.batch_sampler.even_batches


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_cannot_be_are_refused(port: int) -> None:
    with pytest.raises(TrainingError, match=f"main_process_port is {port}: ports are 0 to 65535"):
        LaunchSettings(main_process_port=port)
    with pytest.raises(TrainingError, match=f"port is {port}: ports are 0 to 65535"):
        is_port_in_use(port)


def test_a_broken_pattern_of_ignored_modules_is_shown() -> None:
    plugin = FullyShardedDataParallelPlugin(ignored_modules="layers.[0")
    with pytest.raises(TrainingError, match=r"ignored_modules='layers\.\[0' is no regular expression: unterminated character set"):
        ignored_modules(nn.Linear(1, 1), plugin)


@pytest.mark.parametrize("config", [[1], 3])
def test_deepspeed_configs_are_files_or_dicts(config: Any) -> None:
    with pytest.raises(WrongTypeError, match=r"The DeepSpeed config is a JSON file's path or a dict, not (a list|an int)"):
        DeepSpeedPlugin(hf_ds_config=config)


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
@pytest.mark.parametrize("count", [0, -1])
def test_a_launch_has_processes(launcher: Callable[..., None], count: int) -> None:
    with pytest.raises(TrainingError, match=rf"{launcher.__name__}\(num_processes={count}\): there is at least one process"):
        launcher(print, num_processes=count)


def test_values_that_no_tracker_keeps_are_told(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    silent, tracked = Accelerator(cpu=True), Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent.log({"loss": 0.5})
    with pytest.warns(UserWarning, match="log: no tracker of log_with is started.*call init_trackers first"):
        tracked.log({"loss": 0.5})
    tracked.init_trackers("run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracked.log({"loss": 0.5})
    tracked.end_training()


@pytest.mark.parametrize(("settings", "message"), [
    ({"fsdp_plugin": {}}, "fsdp_plugin takes a FullyShardedDataParallelPlugin, not a dict"),
    ({"fsdp_plugin": {"one": FullyShardedDataParallelPlugin()}}, "fsdp_plugin takes a FullyShardedDataParallelPlugin, not a dict"),
    ({"deepspeed_plugin": {}}, "deepspeed_plugin takes a DeepSpeedPlugin, not a dict"),
    ({"rng_types": ["generator", "foo"]}, "rng_type is 'foo'; use one of"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    AcceleratorState._reset_state(True)
    with pytest.raises(TrainingError, match=message):
        Accelerator(cpu=True, **settings)
    AcceleratorState._reset_state(True)
