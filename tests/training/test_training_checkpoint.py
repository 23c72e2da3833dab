"""Stopping and going on in one process: to the bit, from complete folders only."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from bigmodel.errors import CheckpointError, CheckpointNotFoundError, MatchError, TrainingError
from bigmodel.training import checkpoint_folder
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.configuration import DataLoaderConfiguration, ProjectConfiguration
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.plugins.fsdp import FullyShardedDataParallelPlugin

SAMPLES = 20


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Samples that draw numbers when they are read (not in worker processes, nor where torchdata reads)."""

    def __init__(self, noise: float):
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator) + self.noise * torch.rand(1), index


class Counter:
    """A custom object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def fresh() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Job:
    """A loop with dropout, shuffling, accumulation, a schedule and a custom object."""

    def __init__(self, *, workers: int = 0, seedable: bool = False, stateful: bool = False, tied: bool = False, **arguments: Any):
        fresh()
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable, use_stateful_dataloader=stateful),
            **arguments,
        )
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), nn.Linear(4, 4))
        if tied:
            model[3].weight = model[0].weight
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(Noisy(0.0 if workers or stateful else 0.01), batch_size=2, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, inner, loader, LambdaLR(inner, lambda step: 1 / (1 + step))
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def steps(self, epochs: int) -> Iterator[tuple[list[int], float]]:
        for _ in range(epochs):
            for inputs, indices in self.loader:
                yield self.step(inputs, indices)

    def step(self, inputs: torch.Tensor, indices: torch.Tensor) -> tuple[list[int], float]:
        with self.accelerator.accumulate(self.model):
            noise = random.random() + numpy.random.rand()
            loss = (self.model(inputs) - inputs).square().mean() * noise
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.count += len(indices)
        return indices.tolist(), loss.item()


@pytest.mark.parametrize(
    "options", [{}, {"workers": 2}, {"seedable": True}, {"stateful": True}, {"tied": True}, {"mixed_precision": "fp16"}]
)
@pytest.mark.parametrize("stop", [4, 10, 14])
def test_a_stopped_job_goes_on_to_the_bit(options: dict[str, Any], stop: int, tmp_path: Path) -> None:
    whole = list(Job(**options).steps(2))
    first = Job(**options)
    seen = []
    steps = first.steps(2)
    for _ in range(stop):
        seen.append(next(steps))
    first.accelerator.save_state(tmp_path / "state")
    second = Job(**options)
    torch.manual_seed(17)  # nothing may depend on what the new process has drawn
    second.accelerator.load_state(tmp_path / "state")
    assert second.counter.count == 2 * stop
    # The rest of the epoch that was stopped; at its end, that rest is the whole of the next one.
    seen += list(second.steps(2 - stop // 10))
    assert seen == whole


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_job_goes_back_in_the_same_process(precision: str, tmp_path: Path) -> None:
    job = Job(mixed_precision=precision)
    steps = job.steps(1)
    for _ in range(4):
        next(steps)
    job.accelerator.save_state(tmp_path)
    expected = list(steps)  # the loop goes on
    for _ in range(2):
        job.accelerator.load_state(tmp_path)
        assert list(job.steps(1)) == expected


def test_skipping_by_hand_gives_the_same_rest(tmp_path: Path) -> None:
    whole = list(Job().steps(2))
    first = Job()
    steps = first.steps(1)
    for _ in range(4):
        next(steps)
    first.accelerator.save_state(tmp_path)
    second = Job()
    second.accelerator.load_state(tmp_path)
    rest = [second.step(*batch) for batch in second.accelerator.skip_first_batches(second.loader, 4)]
    rest += list(second.steps(1))
    assert rest == whole[4:]


def test_the_folder_has_the_names_that_others_look_for(tmp_path: Path) -> None:
    job = Job(mixed_precision="fp16", tied=True)
    other = job.accelerator.prepare(nn.Linear(2, 2))
    folder = job.accelerator.save_state(tmp_path / "state")
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.bin",
        "scheduler.bin",
        "sampler.bin",
        "scaler.pt",
        "random_states_0.pkl",
        "custom_checkpoint_0.pkl",
        "training_state.json",
    }
    for file in folder.iterdir():
        if file.suffix in (".bin", ".pt", ".pkl"):
            torch.load(file, weights_only=True)
    with torch.no_grad():
        other.weight.zero_()
        job.model[0].weight.zero_()
    job.accelerator.load_state(folder)
    assert other.weight.abs().sum() > 0
    assert job.model[0].weight.abs().sum() > 0
    assert job.model[3].weight is job.model[0].weight
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("given", ["state", Path("runs/state"), "./state"])
def test_the_folder_is_told_as_it_was_given(given: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Accelerator(cpu=True).save_state(given)
    assert folder == Path(given)
    assert (folder / "training_state.json").exists()


def test_a_folder_that_is_told_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Accelerator(cpu=True).save_state("not_there/../state") == tmp_path / "state"
    assert Accelerator(cpu=True).save_state("~/state") == tmp_path / "state"


def test_a_numbered_folder_is_told_below_the_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
    assert Accelerator(cpu=True, project_config=project).save_state() == Path("project/checkpoints/checkpoint_0")


@pytest.mark.parametrize(("saved", "registered"), [(1, 0), (2, 1), (0, 1), (1, 3)])
def test_as_many_objects_are_registered_as_were_saved(saved: int, registered: int, tmp_path: Path) -> None:
    def trained(count: int) -> tuple[Accelerator, nn.Linear, list[Counter]]:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        counters = [Counter() for _ in range(count)]
        accelerator.register_for_checkpointing(*counters)
        return accelerator, model, counters

    accelerator, _, counters = trained(saved)
    for counter in counters:
        counter.count = 5
    accelerator.save_state(tmp_path / "state")
    accelerator, model, counters = trained(registered)
    before = model.weight.detach().clone()
    names = ", ".join(f"custom_checkpoint_{index}.pkl" for index in range(saved)) or "none"
    told = rf"state.*of {saved} registered objects \({names}\), and {registered} are registered"
    with pytest.raises(TrainingError, match=told) as caught:
        accelerator.load_state(tmp_path / "state")
    assert isinstance(caught.value, RuntimeError)
    assert torch.equal(model.weight, before)
    assert [counter.count for counter in counters] == [0] * registered


def test_files_of_torch_do_as_well(tmp_path: Path) -> None:
    job = Job()
    expected = job.model[0].weight.detach().clone()
    job.accelerator.save_state(tmp_path, safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").exists()
    with torch.no_grad():
        job.model[0].weight.zero_()
    job.accelerator.load_state(tmp_path, load_kwargs={"map_location": "on_device"})
    assert torch.equal(job.model[0].weight, expected)
    with pytest.raises(TrainingError, match="weights_only"):
        job.accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})


def test_checkpoints_are_numbered_and_the_oldest_go(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    job = Job(project_config=project)
    for number in range(3):
        job.counter.count = number
        assert job.accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
    assert sorted(file.name for file in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    again = Job(project_config=ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2))
    again.accelerator.project_configuration.iteration = 1
    with pytest.raises(TrainingError, match="checkpoint_1 exists"):
        again.accelerator.save_state()
    again.accelerator.load_state()
    assert again.counter.count == 2
    assert again.accelerator.save_iteration == 3
    again.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert again.counter.count == 1


def test_after_ten_the_latest_is_ten(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, iteration=9)
    accelerator = Accelerator(cpu=True, project_config=project)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for counter.count in (9, 10):
        accelerator.save_state()
    accelerator.load_state()
    assert counter.count == 10


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Broken(Counter):
    def state_dict(self) -> dict[str, Any]:
        raise OSError("the disk is full")


class Unreadable(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"counter": Counter()}


@pytest.mark.parametrize(("thing", "error", "message"), [(Broken(), CheckpointError, "full"), (Unreadable(), TrainingError, "Unreadable")])
def test_a_save_that_fails_leaves_what_was_there(thing: Counter, error: type[Exception], message: str, tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    job = Job(project_config=project)
    job.accelerator.save_state()
    before = tree(tmp_path)
    job.accelerator.register_for_checkpointing(thing)
    with pytest.raises(error, match=message):
        job.accelerator.save_state()
    assert tree(tmp_path) == before
    assert sorted(file.name for file in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0"]
    assert job.accelerator.save_iteration == 1


def test_saving_again_replaces_what_was_saved_and_nothing_else(tmp_path: Path) -> None:
    job = Job()
    extra = job.accelerator.prepare(nn.Linear(1, 1))
    job.accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("mine")
    (tmp_path / "state" / "logs").mkdir()
    (tmp_path / "state" / "logs" / "log.txt").write_text("mine, too")
    job.accelerator._models.remove(extra)
    job.accelerator.save_state(tmp_path / "state")
    names = {file.name for file in (tmp_path / "state").iterdir()}
    assert "model_1.safetensors" not in names
    assert {"notes.txt", "logs", "model.safetensors"} <= names
    assert (tmp_path / "state" / "logs" / "log.txt").read_text() == "mine, too"
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_the_folder_that_somebody_works_in_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    inode = tmp_path.stat().st_ino
    job = Job()
    extra = job.accelerator.prepare(nn.Linear(1, 1))
    job.accelerator.save_state(".")
    job.accelerator._models.remove(extra)
    job.counter.count = 7
    job.accelerator.save_state(".")
    assert tmp_path.stat().st_ino == inode
    names = {file.name for file in tmp_path.iterdir()}
    assert {"notes.txt", "model.safetensors", "training_state.json"} <= names
    assert "model_1.safetensors" not in names
    assert not any(name.startswith(".") for name in names)
    job.counter.count = 0
    job.accelerator.load_state(".")
    assert job.counter.count == 7
    real = checkpoint_folder.os.replace
    monkeypatch.setattr(checkpoint_folder.os, "replace", lambda *args: real("nowhere", "nowhere"))
    with pytest.raises(CheckpointError, match="nowhere"):
        job.accelerator.save_state(".")
    with pytest.raises(CheckpointError, match="damaged"):
        job.accelerator.load_state(".")


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(CheckpointError, match="it is a file"):
        Job().accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state").read_text() == "a file"


def test_a_process_killed_in_the_middle_leaves_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.accelerator.save_state(tmp_path / "state")
    before = tree(tmp_path / "state")
    renames = []

    class Killed(BaseException):
        pass

    def rename(old: Any, new: Any) -> None:
        if len(renames) == 1:  # between moving the old one away and the new one in
            raise Killed
        renames.append((old, new))
        real(old, new)

    real = checkpoint_folder.os.rename
    monkeypatch.setattr(checkpoint_folder.os, "rename", rename)
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.raises(Killed):
        job.accelerator.save_state(tmp_path / "state")
    monkeypatch.undo()
    assert not (tmp_path / "state").exists()
    with pytest.raises(CheckpointNotFoundError, match="interrupted"):
        job.accelerator.load_state(tmp_path / "state")
    job.accelerator.save_state(tmp_path / "state")
    assert tree(tmp_path / "state").keys() == before.keys()
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_an_incomplete_copy_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    job = Job()
    job.accelerator.save_state(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"short")
    job.counter.count = 5
    with pytest.raises(CheckpointError, match=r"optimizer\.bin has 5 bytes, and was saved with \d+"):
        job.accelerator.load_state(tmp_path)
    (tmp_path / "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing"):
        job.accelerator.load_state(tmp_path)
    assert job.counter.count == 5
    (tmp_path / "training_state.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        job.accelerator.load_state(tmp_path)
    (tmp_path / "training_state.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no optimizer\.bin"):
        job.accelerator.load_state(tmp_path)


def test_files_that_would_run_code_are_refused(tmp_path: Path) -> None:
    job = Job()
    job.accelerator.save_state(tmp_path)
    (tmp_path / "training_state.json").unlink()
    torch.save({"state": Counter()}, tmp_path / "optimizer.bin")
    with pytest.raises(TrainingError, match=r"optimizer\.bin \(optimizer 0\) cannot be read"):
        job.accelerator.load_state(tmp_path)


def test_another_model_is_told(tmp_path: Path) -> None:
    Job().accelerator.save_state(tmp_path)
    fresh()
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Counter())
    accelerator.prepare(nn.Linear(3, 3))
    with pytest.raises(MatchError, match=r"model\.safetensors does not fill model 0"):
        accelerator.load_state(tmp_path)
    accelerator.prepare(nn.Linear(3, 3))
    with pytest.raises(CheckpointNotFoundError, match=r"no model_1\.safetensors for model 1, a Linear"):
        accelerator.load_state(tmp_path, strict=False)


def test_hooks_save_and_load_in_their_own_way(tmp_path: Path) -> None:
    job = Job()
    calls = []

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        calls.append("save")
        assert models == [job.model]
        state = weights.pop()
        (Path(folder) / "own.json").write_text(json.dumps(state["0.bias"].tolist()))

    def load(models: list[nn.Module], folder: str) -> None:
        calls.append("load")
        bias = torch.tensor(json.loads((Path(folder) / "own.json").read_text()))
        with torch.no_grad():
            models.pop()[0].bias.copy_(bias)

    saving = job.accelerator.register_save_state_pre_hook(save)
    loading = job.accelerator.register_load_state_pre_hook(load)
    expected = job.model[0].bias.detach().clone()
    job.accelerator.save_state(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        job.model[0].bias.zero_()
    job.accelerator.load_state(tmp_path)
    assert torch.equal(job.model[0].bias, expected)
    saving.remove()
    loading.remove()
    job.accelerator.save_state(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert calls == ["save", "load"]


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"mixed_precision": "fp16"}, {"dynamo_backend": "eager"}])
@pytest.mark.parametrize("stop", [1, 5, 13])
def test_a_job_that_was_stopped_between_two_steps_goes_on_to_the_bit(options: dict[str, Any], stop: int, tmp_path: Path) -> None:
    whole = list(Job(**options).steps(2))
    first = Job(**options)
    steps = first.steps(2)
    seen = [next(steps) for _ in range(stop)]
    gradients = [None if each.grad is None else each.grad.clone() for each in first.model.parameters()]
    first.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "gradients_0.safetensors").exists()
    second = Job(**options)
    next(second.steps(1))  # gradients of its own, that go
    second.accelerator.load_state(tmp_path / "state")
    assert not second.accelerator.sync_gradients
    for parameter, expected in zip(second.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0, equal_nan=True)  # fp16 begins with overflows
    seen += list(second.steps(2 - stop // 10))
    assert seen == whole


def test_gradients_of_a_loop_that_counts_by_itself(tmp_path: Path) -> None:
    def job() -> tuple[Accelerator, nn.Module, Any]:
        fresh()
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(3, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def backward(accelerator: Accelerator, model: nn.Module) -> None:
        accelerator.backward(model(torch.arange(3.0)).sum())

    accelerator, model, optimizer = job()
    backward(accelerator, model)
    accelerator.save_state(tmp_path / "waiting")
    backward(accelerator, model)
    optimizer.step()
    accelerator.save_state(tmp_path / "stepped")  # what the next step's zero_grad will take
    assert not (tmp_path / "stepped" / "gradients_0.safetensors").exists()
    expected = model.weight.detach().clone()
    accelerator, model, optimizer = job()
    accelerator.load_state(tmp_path / "waiting")
    backward(accelerator, model)
    optimizer.step()
    assert torch.equal(model.weight, expected)
    accelerator.load_state(tmp_path / "stepped")
    assert model.weight.grad is None


def test_gradients_that_cannot_be_saved_or_do_not_fit_are_told(tmp_path: Path) -> None:
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Embedding(4, 2, sparse=True)
    model, _ = accelerator.prepare(model, torch.optim.SparseAdam(model.parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([1])).sum())
    with pytest.raises(TrainingError, match=r"gradients of model_0\.weight are sparse.*sync_gradients"):
        accelerator.save_state(tmp_path / "sparse")

    def job(size: int, steps: int = 2) -> tuple[Accelerator, nn.Module]:
        fresh()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model = nn.Linear(size, 2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(size)).sum())
        return accelerator, model

    job(3)[0].save_state(tmp_path / "three")
    accelerator, _ = job(3, steps=4)
    with pytest.warns(UserWarning, match=r"accumulation of 2 batches.*divided by 2, those to come by 4"):
        accelerator.load_state(tmp_path / "three")
    job(4)[0].save_state(tmp_path / "four")
    # Hooks may fill models in their own way, so the gradients are looked at by themselves.
    accelerator, _ = job(3)
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    with pytest.raises(MatchError, match=r"model_0\.weight is a gradient of shape \(2, 4\); the parameter has shape \(2, 3\)"):
        accelerator.load_state(tmp_path / "four")
    (tmp_path / "three" / "gradients_0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"gradients_0\.safetensors is missing"):
        accelerator.load_state(tmp_path / "three")


def test_gradients_that_are_kept_in_parts_are_told(tmp_path: Path) -> None:
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = nn.Linear(3, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 3)).sum())
    with pytest.warns(UserWarning, match=r"batch 1 of 2.*not part of it: FSDP keeps them in parts.*sync_gradients"):
        accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert accelerator.step == 1


def test_without_a_folder_there_is_nothing_to_do() -> None:
    job = Job()
    for call in (job.accelerator.save_state, job.accelerator.load_state):
        with pytest.raises(TrainingError, match="needs a folder"):
            call()
    with pytest.raises(TrainingError, match="int cannot be registered"):
        job.accelerator.register_for_checkpointing(Counter(), 3)
    job = Job(project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(TrainingError, match="project_dir"):
        job.accelerator.save_state()


def test_models_are_saved_for_others(tmp_path: Path) -> None:
    job = Job(mixed_precision="bf16", dynamo_backend="eager")
    job.accelerator.save_model(job.model, tmp_path, max_shard_size=64)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "0.weight" in index["weight_map"]
    job.accelerator.save({"some": torch.ones(1)}, tmp_path / "some.pt")
    assert torch.load(tmp_path / "some.pt", weights_only=True)["some"].item() == 1
