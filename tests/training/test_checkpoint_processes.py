"""Stopping and going on in several processes, and with another number of them; failures of one are failures of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes, RanksFailed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigmodel.errors import CheckpointError, TrainingError
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.configuration import DataLoaderConfiguration, ProjectConfiguration
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.handlers import DistributedDataParallelKwargs

pytestmark = pytest.mark.xdist_group("processes")

Sizes = Callable[[int], Processes]


class Job:
    """Shuffled samples, dropout that differs between processes, accumulation."""

    def __init__(self, config: dict[str, Any], **arguments: Any):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(**config), **arguments
        )
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        loader = DataLoader(TensorDataset(torch.arange(26.0)[:, None]), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
        torch.manual_seed(self.accelerator.process_index)

    def steps(self, epochs: int) -> Any:
        for _ in range(epochs):
            for (numbers,) in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(numbers / 26) - 1).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield numbers.flatten().tolist(), loss.item()


def stopped_and_resumed(folder: str, config: dict[str, Any], stop: int) -> tuple[list[Any], list[Any]]:
    whole = list(Job(config).steps(2))
    first = Job(config)
    steps = first.steps(2)
    seen = [next(steps) for _ in range(stop)]
    first.accelerator.save_state(folder)
    del steps
    second = Job(config)
    torch.manual_seed(99)
    second.accelerator.load_state(folder)
    seen += list(second.steps(2))[: len(whole) - stop]
    return whole, seen


@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True}, {"split_batches": True}, {"dispatch_batches": True}])
def test_every_process_goes_on_to_the_bit(processes: Sizes, config: dict[str, Any], tmp_path: Path) -> None:
    ranks = processes(2).run(stopped_and_resumed, str(tmp_path / "state"), config, 4)
    for whole, seen in ranks:
        assert seen == whole
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {file.name for file in (tmp_path / "state").iterdir()}


def stopped_between_steps(folder: str) -> tuple[list[Any], list[Any]]:
    options = {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}
    whole = list(Job({}, **options).steps(2))
    first = Job({}, **options)
    steps = first.steps(1)
    seen = [next(steps) for _ in range(3)]
    first.accelerator.save_state(folder)
    del steps
    second = Job({}, **options)
    torch.manual_seed(99)
    second.accelerator.load_state(folder)
    return whole, seen + list(second.steps(2))


def gradients_after_loading(folder: str) -> dict[str, Any]:
    job = Job({})
    job.accelerator.load_state(folder)
    return {f"model_0.{name}": parameter.grad for name, parameter in job.model.named_parameters()}


def test_every_process_keeps_its_gradients(processes: Sizes, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    for whole, seen in processes(2).run(stopped_between_steps, str(folder)):
        assert seen == whole
    files = [load_file(folder / f"gradients_{rank}.safetensors") for rank in range(2)]
    assert not all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        alone = gradients_after_loading(str(folder))
    assert alone.keys() == files[0].keys()
    for name, gradient in alone.items():
        assert torch.equal(gradient, files[0][name] / 2 + files[1][name] / 2)


def weights_after_loading(folder: str) -> list[torch.Tensor]:
    job = Job({})
    job.accelerator.load_state(folder)
    return list(job.accelerator.get_state_dict(job.model).values())


def saved(folder: str) -> list[torch.Tensor]:
    job = Job({})
    list(job.steps(1))
    job.accelerator.save_state(folder)
    job.accelerator.save_model(job.model, Path(folder) / "exported")
    return list(job.accelerator.get_state_dict(job.model).values())


def test_one_process_goes_on_from_two_and_three_from_two(processes: Sizes, tmp_path: Path) -> None:
    expected = processes(2).run(saved, str(tmp_path))[0]
    assert (tmp_path / "exported" / "model.safetensors").exists()
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        alone = weights_after_loading(str(tmp_path))
    assert all(map(torch.equal, alone, expected))
    for loaded in processes(3).run(weights_after_loading, str(tmp_path)):
        assert all(map(torch.equal, loaded, expected))


class Broken:
    """Cannot be saved in one process."""

    def __init__(self, rank: int):
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if AcceleratorState().process_index == self.rank:
            raise OSError("no space")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def failing_hook(models: list[Any], weights: list[Any], folder: str) -> None:
    if AcceleratorState().process_index == 1:
        raise OSError("no space")


def failing(folder: str, where: str) -> list[str]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    job = Job({}, project_config=project)
    job.accelerator.save_state()
    if where == "main":
        job.accelerator.register_for_checkpointing(Broken(0))
    else:
        job.accelerator.register_save_state_pre_hook(failing_hook)
    with pytest.raises((CheckpointError, TrainingError)) as caught:
        job.accelerator.save_state()
    job.accelerator.wait_for_everyone()
    return [type(caught.value).__name__, str(caught.value)]


@pytest.mark.parametrize(("where", "failed"), [("main", 0), ("other", 1)])
def test_where_one_fails_all_do_and_nothing_is_left(processes: Sizes, where: str, failed: int, tmp_path: Path) -> None:
    stories = processes(2).run(failing, str(tmp_path), where)
    assert stories[failed][0] == "CheckpointError"
    assert stories[1 - failed][0] == "TrainingError"
    assert f"failed in process {failed}" in stories[1 - failed][1]
    assert all("no space" in message for _, message in stories)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]


def loading_nothing(folder: str) -> None:
    Job({}).accelerator.load_state(folder)


def test_a_missing_folder_is_told_by_all(processes: Sizes, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="there is no such folder") as caught:
        processes(2).run(loading_nothing, str(tmp_path / "nowhere"))
    assert set(caught.value.errors) == {0, 1}


def saved_under_own_names(folder: str) -> tuple[Path, list[Any], list[Any], str]:
    job = Job({})
    own = Path(folder) / f"at-{job.accelerator.process_index}"
    place = job.accelerator.save_state(own)
    rest = list(job.steps(1))
    job.accelerator.load_state(place)
    again = list(job.steps(1))
    own.mkdir(exist_ok=True)
    try:
        job.accelerator.load_state(own)
    except TrainingError as error:
        return place, rest, again, str(error)
    return place, rest, again, "nothing told"


def test_one_folder_is_written_and_returned_whatever_each_process_calls_it(processes: Sizes, tmp_path: Path) -> None:
    for place, rest, again, told in processes(2).run(saved_under_own_names, str(tmp_path)):
        assert place == tmp_path / "at-0"
        assert rest == again
        assert told.startswith(
            f"load_state: process 1 reads {tmp_path / 'at-1'}, which save_state has not written, and others read {place}"
        )
