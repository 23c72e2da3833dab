"""The Accelerator in one process: what it prepares, how it accumulates and scales, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import bigmodel
from bigmodel.errors import TrainingError
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from bigmodel.training.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler, ProfileKwargs
from bigmodel.training.optimizer import AcceleratedOptimizer
from bigmodel.training.scheduler import AcceleratedScheduler

SAMPLES = 12


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain_training(batch_size: int, epochs: int = 2, drop_last: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for _ in range(epochs):
        for inputs, targets in DataLoader(samples(), batch_size=batch_size, drop_last=drop_last):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, weights(model)


def prepared_training(accelerator: Accelerator, batch_size: int, epochs: int = 2) -> tuple[list[float], list[torch.Tensor]]:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = LambdaLR(inner, lambda step: 1 / (1 + step))
    scheduler, loader, optimizer, model = accelerator.prepare(scheduler, DataLoader(samples(), batch_size=batch_size), inner, model)
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, weights(model)


def test_a_prepared_loop_is_the_plain_loop() -> None:
    expected_losses, expected = plain_training(4)
    losses, trained = prepared_training(Accelerator(cpu=True), 4)
    assert losses == expected_losses
    assert all(map(torch.equal, trained, expected))


def test_accumulated_batches_are_one_large_batch() -> None:
    _, expected = plain_training(4)
    _, trained = prepared_training(Accelerator(cpu=True, gradient_accumulation_steps=4), 1)
    for ours, theirs in zip(trained, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_last_batch_of_a_loader_ends_the_accumulation() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(samples(5), batch_size=1))
    for _ in range(2):
        syncs = []
        for _ in loader:
            with accelerator.accumulate():
                syncs.append(accelerator.sync_gradients)
        assert syncs == [False, True, False, True, True]
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3


def test_without_the_loader_accumulation_goes_on_over_its_end() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(DataLoader(samples(3), batch_size=1))
    syncs = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate():
                syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, False, True, False, True]


def test_objects_come_back_in_their_order_and_once() -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(inner, lambda step: 1.0)
    scheduler = accelerator.prepare(schedule)
    optimizer, something = accelerator.prepare(inner, "something else")
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert something == "something else"
    assert scheduler.optimizers == [optimizer]
    ready = accelerator.prepare(model)
    assert accelerator.prepare(model, inner, schedule) == (ready, optimizer, scheduler)
    assert accelerator.prepare(ready, optimizer, scheduler) == (ready, optimizer, scheduler)
    assert [len(each) for each in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1, 1, 1]
    with pytest.raises(TrainingError, match="2 entries for 1 objects"):
        accelerator.prepare(model, device_placement=[True, False])


def test_each_scheduler_follows_its_own_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = (torch.optim.SGD(network().parameters(), lr=1.0) for _ in range(2))
    schedulers = [LambdaLR(each, lambda step: 1.0) for each in (second, first)]
    a, b, of_second, of_first = accelerator.prepare(first, second, *schedulers)
    assert of_second.optimizers == [b]
    assert of_first.optimizers == [a]
    later = accelerator.prepare(LambdaLR(a, lambda step: 1.0))  # made of the prepared one
    assert later.optimizers == [a]


def test_models_compute_in_half_precision_and_answer_in_float32() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = network()
    own = model.forward
    inputs = torch.randn(3, 4)
    inner_dtypes = []
    model[0].register_forward_hook(lambda module, args, output: inner_dtypes.append(output.dtype))
    ready = accelerator.prepare(model)
    outputs = ready(inputs)
    assert (outputs.dtype, inner_dtypes) == (torch.float32, [torch.bfloat16])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(outputs, own(inputs).float())
    with accelerator.autocast():
        assert (inputs @ inputs.T).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (inputs @ inputs.T).dtype == torch.float32
    accelerator.backward(outputs.sum())
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert accelerator.unwrap_model(ready, keep_fp32_wrapper=False)(inputs).dtype == torch.float32
    assert inner_dtypes[-1] == torch.float32


def test_a_model_prepared_again_has_the_new_precision() -> None:
    model = network()
    own = model.forward
    Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    dtypes = []
    model[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    ready = accelerator.prepare(model)
    ready(torch.ones(1, 4))
    assert dtypes == [torch.float16]
    assert accelerator.unwrap_model(ready, keep_fp32_wrapper=False).forward == own


def test_optimizers_of_one_backward_share_one_scale() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0, growth_interval=1)])
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = accelerator.prepare(torch.optim.SGD([first], lr=1.0), torch.optim.SGD([second], lr=1.0))
    for step in range(2):
        accelerator.backward((first * 0.25 + second * 0.5).sum())
        accelerator.clip_grad_norm_([first], 100.0)
        assert first.grad.item() == 0.25
        accelerator.clip_grad_value_([first, second], 100.0)
        assert second.grad.item() == 0.5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert [first.item(), second.item()] == [1 - 0.25 * (step + 1), 1 - 0.5 * (step + 1)]
    accelerator.backward((first * float("inf") + second).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert accelerator.scaler is not None


def test_gradients_in_the_middle_of_accumulation_are_not_unscaled() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    with accelerator.accumulate():
        accelerator.backward(parameter.sum())
        with pytest.raises(TrainingError, match="sync_gradients"):
            accelerator.clip_grad_norm_([parameter], 1.0)
    with accelerator.accumulate():
        accelerator.backward(parameter.sum())
        assert accelerator.clip_grad_norm_(iter([parameter]), 0.5) == 1.0
        optimizer.step()
    assert parameter.item() == pytest.approx(0.5, abs=1e-5)


def test_clipping_is_torchs() -> None:
    accelerator = Accelerator(cpu=True)
    parameter = nn.Parameter(torch.ones(2))
    (parameter * torch.tensor([3.0, 4.0])).sum().backward()
    assert accelerator.clip_grad_norm_(parameter, 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    accelerator.clip_grad_value_([parameter], 0.7)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.7]))


def test_models_are_compiled_once() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = network()
    ready = accelerator.prepare(model)
    assert ready._orig_mod is model
    assert accelerator.unwrap_model(ready) is ready
    assert accelerator.unwrap_model(ready, keep_torch_compile=False) is model
    assert accelerator.prepare(ready) is ready
    assert torch.equal(ready(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert set(accelerator.get_state_dict(ready)) == set(model.state_dict())


def test_a_second_accelerator_trains_as_the_first() -> None:
    Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    second = Accelerator()
    assert second.mixed_precision == "bf16"
    assert second.state.dynamo_plugin.backend == "EAGER"
    with pytest.raises(TrainingError, match="bf16"):
        Accelerator(mixed_precision="fp16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "int4"}, "int4"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
        ({"kwargs_handlers": [KwargsHandler()]}, "KwargsHandler, which nothing here uses"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)}, "give one"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")}, "give one"),
        ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, "split_batches=True"),
        ({"deepspeed_plugin": 1, "deepspeed_plugins": 2}, "one argument"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Accelerator(cpu=True, **arguments)


def test_settings_can_be_read() -> None:
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=False, even_batches=False, non_blocking=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config, project_config=ProjectConfiguration(), project_dir="here")
    assert (accelerator.split_batches, accelerator.dispatch_batches, accelerator.even_batches) == (True, False, False)
    assert (accelerator.non_blocking, accelerator.use_seedable_sampler, accelerator.use_stateful_dataloader) == (True, False, False)
    accelerator.even_batches = True
    assert accelerator.even_batches
    assert (accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration) == ("here", "here", 0)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert (accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process) == (True, True, True)
    assert (accelerator.use_distributed, accelerator.multi_device, accelerator.device.type) == (False, False, "cpu")
    assert (accelerator.mixed_precision, accelerator.scaler) == ("no", None)
    assert (accelerator.deepspeed_plugin, accelerator.is_fsdp2) == (None, False)
    assert accelerator.should_save_model
    assert bigmodel.Accelerator is Accelerator


def test_memory_is_given_back() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(network(), torch.optim.SGD(network().parameters(), lr=1.0))
    alive = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert (model, optimizer, alive()) == (None, None, None)
    assert accelerator.clear() == []


def test_one_process_has_everything_already() -> None:
    accelerator = Accelerator(cpu=True)
    batch = {"tensor": torch.arange(3), "text": ["a", "b", "c"]}
    assert accelerator.gather_for_metrics(batch) is batch
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    with accelerator.join_uneven_inputs([network()]):
        pass
    with accelerator.no_sync(network()), accelerator.trigger_sync_in_backward(network()):
        pass
    with accelerator.split_between_processes([1, 2]) as share:
        assert share == [1, 2]
    assert accelerator.on_main_process(lambda: 3)() == 3
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.wait_for_everyone()


def test_a_run_is_profiled(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))])
    with accelerator.profile() as profiler:
        torch.ones(3) @ torch.ones(3)
    assert any("dot" in event.key for event in profiler.key_averages())
    assert (tmp_path / "profile_0.json").exists()


def test_skipped_batches_are_not_seen() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(samples(5), batch_size=1))
    rest = accelerator.skip_first_batches(loader, 3)
    assert [inputs[0, 0].item() for inputs, _ in rest] == [samples(5)[index][0][0].item() for index in (3, 4)]


def test_dispatched_models_stay_where_they_are() -> None:
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    expected = model(torch.ones(1, 4))
    bigmodel.cpu_offload(model[0])
    accelerator = Accelerator(cpu=True)
    ready, optimizer = accelerator.prepare(model, torch.optim.SGD(model[2].parameters(), lr=1.0))
    outputs = ready(torch.ones(1, 4))
    torch.testing.assert_close(outputs, expected)
    accelerator.backward(outputs.sum())
    optimizer.step()
    torch.testing.assert_close(model[2].bias.detach(), network()[2].bias.detach() - 1)


class Diary:
    """A tracker of a user's own."""

    name = "diary"
    main_process_only = True

    def __init__(self) -> None:
        self.pages: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.pages

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.pages.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.pages.append((values, step, kwargs))

    def finish(self) -> None:
        self.pages.append("end")


def test_trackers_are_told() -> None:
    diary = Diary()
    accelerator = Accelerator(cpu=True, log_with=diary)
    accelerator.init_trackers("project", config={"rate": 0.1})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"diary": {"mood": "good"}, "other": {"x": 1}})
    assert accelerator.get_tracker("diary") is diary
    with pytest.raises(TrainingError, match="no tracker 'wandb'; started by init_trackers: 'diary'"):
        accelerator.get_tracker("wandb")
    pages = accelerator.get_tracker("diary", unwrap=True)
    accelerator.end_training()
    accelerator.get_tracker("diary").log({"loss": 2.0})
    assert pages == [{"rate": 0.1}, ({"loss": 1.0}, 3, {"mood": "good"}), "end"]
    with pytest.raises(TrainingError, match="Diary'>, which is no tracker"):
        Accelerator(cpu=True, log_with=[Diary])


def test_the_state_dict_is_torchs_own_with_the_versions_of_modules() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = model.state_dict()
    state = accelerator.get_state_dict(accelerator.prepare(model))
    assert type(state) is type(expected)
    assert state._metadata == expected._metadata  # type: ignore[attr-defined]
    assert state._metadata["1"]["version"] == 2  # type: ignore[attr-defined]
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.linear(inputs).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def test_models_are_compiled_by_regions_in_half_precision(tmp_path: Path) -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin)
    model = Blocks()
    names, metadata = set(model.state_dict()), model.state_dict()._metadata
    ready, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = ready(torch.ones(2, 4))
    assert before.dtype == torch.float32
    accelerator.backward(before.sum())
    optimizer.step()
    after = ready(torch.ones(2, 4))
    assert not torch.equal(before, after)
    assert set(accelerator.get_state_dict(ready)) == names
    assert accelerator.get_state_dict(ready)._metadata == metadata  # type: ignore[attr-defined]
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(ready(torch.ones(2, 4)), after)


def test_a_model_without_values_is_told() -> None:
    with bigmodel.init_empty_weights():
        model = network()
    with pytest.raises(TrainingError, match=r"no values for 4 tensors \(they are on meta\): 0\.weight"):
        Accelerator(cpu=True).prepare(model)


def test_parts_that_are_dispatched_stay_and_the_rest_moves(accelerators: Any) -> None:
    device = accelerators(1, check_leaks=False)[0]
    model = network()
    expected = model(torch.ones(1, 4))
    bigmodel.cpu_offload(model[0], execution_device=device)
    accelerator = Accelerator()
    ready, optimizer = accelerator.prepare(model, torch.optim.SGD(model[2].parameters(), lr=1.0))
    assert bigmodel.placement(model[0]).offloaded_bytes == 160
    assert bigmodel.placement(model[0]).resident_bytes == 0
    assert model[2].weight.device == device
    outputs = ready(torch.ones(1, 4, device=device))
    torch.testing.assert_close(outputs.cpu(), expected)
    accelerator.backward(outputs.sum())
    optimizer.step()
    torch.testing.assert_close(model[2].bias.detach().cpu(), network()[2].bias.detach() - 1)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # the simulator's own
def test_on_an_accelerator_everything_is_there(accelerators: Any, tmp_path: Path) -> None:
    expected_losses, expected = plain_training(4)
    device = accelerators(1, check_leaks=False)[0]
    accelerator = Accelerator()
    assert accelerator.device == device
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = LambdaLR(inner, lambda step: 1 / (1 + step))
    optimizer, model, loader, scheduler = accelerator.prepare(inner, model, DataLoader(samples(), batch_size=4), schedule)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            assert inputs.device == device
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert {parameter.device for parameter in model.parameters()} == {device}
    trained = weights(model)
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path, load_kwargs={"map_location": "on_device"})
    for ours, loaded, theirs in zip(trained, weights(model), expected, strict=True):
        assert torch.equal(ours, loaded)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].device == device
    stays = accelerator.prepare(network(), device_placement=[False])
    assert next(stays.parameters()).device.type == "cpu"
