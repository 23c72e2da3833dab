"""Settings of training: what is asked for, what the environment says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bigmodel.errors import MissingPackageError, TrainingError
from bigmodel.training import available
from bigmodel.training.configuration import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration, TorchDynamoPlugin
from bigmodel.training.enums import DynamoBackend


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("BIGMODEL_", "ACCELERATE_"):
        for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION"):
            monkeypatch.delenv(f"{prefix}DYNAMO_{name}", raising=False)
        monkeypatch.delenv(f"{prefix}GRADIENT_ACCUMULATION_STEPS", raising=False)


def test_accumulation_steps_come_from_the_argument_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GradientAccumulationPlugin().num_steps is None
    assert GradientAccumulationPlugin(num_steps=2, sync_each_batch=True).to_kwargs() == {"num_steps": 2, "sync_each_batch": True}
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert GradientAccumulationPlugin().to_kwargs() == {"num_steps": 4}
    monkeypatch.setenv("BIGMODEL_GRADIENT_ACCUMULATION_STEPS", "8")
    assert GradientAccumulationPlugin().num_steps == 8
    assert GradientAccumulationPlugin(num_steps=2).num_steps == 2
    monkeypatch.setenv("BIGMODEL_GRADIENT_ACCUMULATION_STEPS", "few")
    with pytest.raises(TrainingError, match="'few'"):
        GradientAccumulationPlugin()


@pytest.mark.parametrize("steps", [0, -1])
def test_less_than_one_batch_makes_no_step(steps: int) -> None:
    with pytest.raises(TrainingError, match=f"num_steps={steps}"):
        GradientAccumulationPlugin(num_steps=steps)


def test_nothing_is_compiled_unless_asked_for() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic, plugin.use_regional_compilation) == ("default", False, None, False)
    assert plugin.to_kwargs() == {}


def test_compilation_is_set_by_arguments_of_any_case() -> None:
    plugin = TorchDynamoPlugin(backend="Inductor", fullgraph=True, dynamic=False, options={"epilogue_fusion": True})  # type: ignore[arg-type]
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": "inductor", "fullgraph": True, "dynamic": False, "options": {"epilogue_fusion": True}}
    regional = TorchDynamoPlugin(backend=DynamoBackend.EAGER, use_regional_compilation=True, disable=True)
    assert regional.to_kwargs() == {"backend": "eager", "disable": True}


def test_the_environment_sets_what_arguments_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("BIGMODEL_DYNAMO_USE_FULLGRAPH", "1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "false")
    monkeypatch.setenv("BIGMODEL_DYNAMO_USE_REGIONAL_COMPILATION", "yes")
    plugin = TorchDynamoPlugin()
    assert plugin.use_regional_compilation is True
    assert plugin.to_kwargs() == {"backend": "aot_eager", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert TorchDynamoPlugin(backend="eager", mode="default", fullgraph=False).to_kwargs() == {"backend": "eager", "dynamic": False}  # type: ignore[arg-type]


def test_what_torch_cannot_compile_with_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"'inducktor'.*'inductor'"):
        TorchDynamoPlugin(backend="inducktor")  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"reduce-overhead.*max_autotune"):
        TorchDynamoPlugin(backend="inductor", mode="reduce-overhead", options={"max_autotune": True})  # type: ignore[arg-type]


def test_the_arguments_of_compilation_are_those_of_torch() -> None:
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    compiled = torch.compile(model, **TorchDynamoPlugin(backend="eager", fullgraph=True, dynamic=True).to_kwargs())  # type: ignore[arg-type]
    assert torch.equal(compiled(batch), model(batch))


def test_a_seed_needs_the_sampler_that_uses_it() -> None:
    assert DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3).data_seed == 3
    with pytest.raises(TrainingError, match=r"data_seed=3.*use_seedable_sampler=True"):
        DataLoaderConfiguration(data_seed=3)


@pytest.mark.parametrize("there", [True, False])
def test_a_stateful_loader_needs_a_torchdata_that_has_one(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(available, "is_package_available", lambda name: bool(asked.append(name)) or there)
    if there:
        assert DataLoaderConfiguration(use_stateful_dataloader=True).use_stateful_dataloader
    else:
        with pytest.raises(MissingPackageError, match=r"pip install 'torchdata>=0\.8\.0'"):
            DataLoaderConfiguration(use_stateful_dataloader=True)
    assert asked == ["torchdata.stateful_dataloader"]


def test_logs_go_to_the_project_unless_told_otherwise(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path))
    assert (project.project_dir, project.logging_dir) == (str(tmp_path), str(tmp_path))
    apart = ProjectConfiguration(logging_dir="logs")
    apart.set_directories("project")
    assert (apart.project_dir, apart.logging_dir) == ("project", "logs")
    late = ProjectConfiguration()
    assert (late.project_dir, late.logging_dir) == (None, None)
    late.set_directories("project")
    assert (late.project_dir, late.logging_dir) == ("project", "project")


@pytest.mark.parametrize("numbers", [{"total_limit": 0}, {"iteration": -1}])
def test_numbers_of_checkpoints_make_sense(numbers: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=f"{next(iter(numbers))}={next(iter(numbers.values()))}"):
        ProjectConfiguration(**numbers)
