"""Each tracker says to its library what scripts tell it, with the calls that the library has."""

from __future__ import annotations

import argparse
import enum
from pathlib import Path
from typing import Any

import fake_libraries as fake
import numpy as np
import pytest
import torch

from bigmodel.errors import MissingPackageError, TrainingError
from bigmodel.training.tracking import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)

CONFIG = {"rate": 0.1, "optimizer": {"name": "sgd", "betas": (0.9, 0.99)}, "dtype": torch.bfloat16, "at": Path("data"), "none": None}
NESTED = {"rate": 0.1, "optimizer": {"name": "sgd", "betas": [0.9, 0.99]}, "dtype": "torch.bfloat16", "at": "data", "none": None}
FLAT = {"rate": 0.1, "optimizer/name": "sgd", "optimizer/betas": "[0.9, 0.99]", "dtype": "torch.bfloat16", "at": "data", "none": None}
VALUES = {"train_loss": torch.tensor(0.5), "accuracy": np.float32(0.25), "eval": {"loss": torch.tensor([2.0])}}
NUMBERS = {"train_loss": 0.5, "accuracy": 0.25, "eval/loss": 2.0}
ROWS = [[1, "a"], [2, "b"]]


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    top, run = fake.wandb(monkeypatch)
    tracker = WandBTracker("project", tags=["first"])
    tracker.start()
    assert tracker.tracker is tracker.run is run
    tracker.store_init_configuration(CONFIG)
    tracker.log({"loss": torch.tensor(0.5), "word": "a"}, step=3, commit=False)
    tracker.log_images({"digits": ["one", "two"]}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=ROWS, step=5)
    tracker.finish()
    assert top.calls == [("init", {"project": "project", "tags": ["first"]})]
    assert run.config.calls == [("update", {"d": NESTED, "allow_val_change": True})]
    assert run.calls == [
        ("log", {"data": {"loss": 0.5, "word": "a"}, "step": 3, "commit": False}),
        ("log", {"data": {"digits": [("Image", "one"), ("Image", "two")]}, "step": 4}),
        ("log", {"data": {"table": ("Table", ["x", "y"], ROWS)}, "step": 5}),
        ("finish", {}),
    ]
    with pytest.raises(TrainingError, match="'wandb' is not started"):
        tracker.log({"loss": 1.0})


def test_trackio(monkeypatch: pytest.MonkeyPatch) -> None:
    top, run = fake.trackio(monkeypatch)
    tracker = TrackioTracker("project", group="g")
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log({"loss": torch.tensor(0.5)}, step=3)
    tracker.log_images({"digits": ["one", "two"], "single": "three"}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=ROWS)
    tracker.finish()
    assert top.calls == [("init", {"project": "project", "group": "g"})]
    assert run.config == NESTED
    images = {"digits/0": ("Image", "one"), "digits/1": ("Image", "two"), "single": ("Image", "three")}
    assert run.calls == [
        ("log", {"metrics": {"loss": 0.5}, "step": 3}),
        ("log", {"metrics": images, "step": 4}),
        ("log", {"metrics": {"table": ("Table", ["x", "y"], ROWS)}, "step": None}),
        ("finish", {}),
    ]


def test_swanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    top, run = fake.swanlab(monkeypatch)
    tracker = SwanLabTracker("project", mode="offline")
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log({"loss": torch.tensor(0.5), "word": "a"}, step=3)
    tracker.log_images({"digits": ["one"]}, step=4)
    tracker.finish()
    assert top.calls == [("init", {"project": "project", "mode": "offline"})]
    assert run.config == NESTED
    assert run.calls == [
        ("log", {"data": {"loss": 0.5, "word": ("Text", "a")}, "step": 3}),
        ("log", {"data": {"digits": [("Image", "one")]}, "step": 4}),
        ("finish", {}),
    ]


def test_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    top, experiment = fake.comet_ml(monkeypatch)
    tracker = CometMLTracker("project", online=False)
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log({**VALUES, "word": "a"}, step=3, epoch=1)
    tracker.log_images({"digits": ["one", "two"]}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=ROWS, step=5)
    tracker.finish()
    assert top.calls == [("start", {"project_name": "project", "online": False})]
    assert experiment.calls == [
        ("log_parameters", {"parameters": FLAT}),
        ("set_step", {"step": 3}),
        ("log_metrics", {"dic": NUMBERS, "step": 3, "epoch": 1}),
        ("log_others", {"dictionary": {"word": "a"}}),
        ("log_image", {"image_data": "one", "name": "digits", "step": 4}),
        ("log_image", {"image_data": "two", "name": "digits", "step": 4}),
        ("log_table", {"filename": "table-5.csv", "tabular_data": ROWS, "headers": ["x", "y"]}),
        ("end", {}),
    ]


def test_aim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    top, run = fake.aim(monkeypatch)
    tracker = AimTracker("name", tmp_path, experiment="e")
    tracker.start()
    assert run.name == "name"
    tracker.store_init_configuration(CONFIG)
    tracker.log({"loss": torch.tensor(0.5), "word": "a"}, step=3, context={"subset": "train"})
    tracker.log_images(
        {"one": ("array", "caption"), "more": ["first", "second"]}, 4, {"aim_image": {"format": "jpeg"}, "track": {"epoch": 2}}
    )
    tracker.finish()
    assert top.calls == [("Run", {"repo": str(tmp_path), "experiment": "e"})]
    assert run.calls == [
        ("set", {"hparams": NESTED}),
        ("track", {"value": 0.5, "name": "loss", "step": 3, "context": {"subset": "train"}}),
        ("track", {"value": ("Text", "a"), "name": "word", "step": 3, "context": {"subset": "train"}}),
        ("track", {"value": ("Image", "array", "caption"), "name": "one", "step": 4, "epoch": 2}),
        ("track", {"value": [("Image", "first", ""), ("Image", "second", "")], "name": "more", "step": 4, "epoch": 2}),
        ("close", {}),
    ]


def test_clearml(monkeypatch: pytest.MonkeyPatch) -> None:
    top, task = fake.clearml(monkeypatch)
    monkeypatch.setenv("CLEARML_TASK", "of the environment")
    tracker = ClearMLTracker("project", tags=["t"])
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log({**VALUES, "word": "a"}, step=3)
    tracker.log({"final": 1})
    tracker.log_images({"test_digits": ["one", "two"], "single": "three"}, step=4)
    tracker.log_table("eval_table", columns=["x", "y"], data=ROWS, step=5)
    tracker.finish()
    assert top.calls == [("current_task", {}), ("init", {"project_name": "project", "task_name": "of the environment", "tags": ["t"]})]
    assert [call for call in task.calls if call[0] != "get_logger"] == [("connect_configuration", {"configuration": NESTED}), ("close", {})]
    assert task.logger.calls == [
        ("report_scalar", {"title": "loss", "series": "train", "value": 0.5, "iteration": 3}),
        ("report_scalar", {"title": "accuracy", "series": "train", "value": 0.25, "iteration": 3}),
        ("report_scalar", {"title": "eval/loss", "series": "train", "value": 2.0, "iteration": 3}),
        ("report_text", {"msg": "word (3): a"}),
        ("report_single_value", {"name": "final", "value": 1}),
        ("report_image", {"title": "digits", "series": "test 0", "iteration": 4, "image": "one"}),
        ("report_image", {"title": "digits", "series": "test 1", "iteration": 4, "image": "two"}),
        ("report_image", {"title": "single", "series": "train", "iteration": 4, "image": "three"}),
        ("report_table", {"title": "table", "series": "eval", "iteration": 5, "table_plot": [["x", "y"], *ROWS]}),
    ]


def test_a_task_of_clearml_that_runs_already_is_taken_and_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    top, task = fake.clearml(monkeypatch, running=True)
    tracker = ClearMLTracker("project")
    tracker.start()
    assert tracker.task is task
    tracker.finish()
    assert top.calls == [("current_task", {})]
    assert task.calls == []


def test_dvclive(monkeypatch: pytest.MonkeyPatch) -> None:
    top, live = fake.dvclive(monkeypatch)
    tracker = DVCLiveTracker("project", dir="folder")
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log(VALUES, step=3, plot=False)
    assert live.step == 3
    tracker.log_images({"digits": "one", "more.jpg": "two"}, step=4)
    assert live.step == 4
    with pytest.raises(TrainingError, match="dvclive logs numbers only, and 'word' is 'a'"):
        tracker.log({"word": "a"})
    tracker.finish()
    assert top.calls == [("Live", {"dir": "folder"})]
    assert live.calls == [
        ("log_params", {"params": NESTED}),
        *[("log_metric", {"name": name, "val": value, "plot": False}) for name, value in NUMBERS.items()],
        ("next_step", {}),
        ("log_image", {"name": "digits.png", "val": "one"}),
        ("log_image", {"name": "more.jpg", "val": "two"}),
        ("end", {}),
    ]
    mine = object()
    given = DVCLiveTracker(live=mine)
    given.start()
    assert given.live is mine


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    top = fake.mlflow(monkeypatch)
    tracker = MLflowTracker("it's new", "folder", tags={"k": "v"}, run_name="first", description="d")
    tracker.start()
    many = {f"p{index}": index for index in range(150)}
    tracker.store_init_configuration(many)
    tracker.log({**VALUES, "word": "a"}, step=3)
    tracker.log_images({"digits": ["one", "two"]}, step=4)
    tracker.log_table("table", columns=["x", "y"], data=ROWS, step=5)
    tracker.log_table("nameless", data=ROWS)
    tracker.log_figure("figure", "figure.png", save_kwargs={"dpi": 10})
    tracker.log_artifact("file", "folder")
    tracker.log_artifacts("files")
    tracker.finish()
    assert top.calls == [
        ("create_experiment", {"name": "it's new", "artifact_location": "folder", "tags": {"k": "v"}}),
        (
            "start_run",
            {"run_id": None, "experiment_id": "new", "run_name": "first", "nested": False, "tags": {"k": "v"}, "description": "d"},
        ),
        ("log_params", {"params": dict(list(many.items())[:100]), "run_id": "run 1"}),
        ("log_params", {"params": dict(list(many.items())[100:]), "run_id": "run 1"}),
        ("log_metrics", {"metrics": NUMBERS, "step": 3, "run_id": "run 1"}),
        ("set_tags", {"tags": {"word": "a"}}),
        ("log_image", {"image": "one", "key": "digits", "step": 4}),
        ("log_image", {"image": "two", "key": "digits", "step": 4}),
        ("log_table", {"data": {"x": [1, 2], "y": ["a", "b"], "step": [5, 5]}, "artifact_file": "table.json", "run_id": "run 1"}),
        ("log_table", {"data": {"column 0": [1, 2], "column 1": ["a", "b"]}, "artifact_file": "nameless.json", "run_id": "run 1"}),
        ("log_figure", {"figure": "figure", "artifact_file": "figure.png", "save_kwargs": {"dpi": 10}}),
        ("log_artifact", {"local_path": "file", "artifact_path": "folder", "run_id": "run 1"}),
        ("log_artifacts", {"local_dir": "files", "artifact_path": None, "run_id": "run 1"}),
        ("end_run", {}),
    ]


def test_the_environment_is_stronger_for_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    top = fake.mlflow(monkeypatch, {"of the environment": "7"})
    for name, value in {"EXPERIMENT_NAME": "of the environment", "RUN_ID": "r", "TAGS": '{"a": "b"}', "NESTED_RUN": "true"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    MLflowTracker("project", run_id="other").start()
    expected = {"run_id": "r", "experiment_id": "7", "run_name": None, "nested": True, "tags": {"a": "b"}, "description": None}
    assert top.calls == [("start_run", expected)]


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"a": {"b": object()}}, r"config\['a'\]\['b'\] is of type object, which comet_ml cannot store"),
        ({"a": [1, print]}, r"config\['a'\]\[1\] is of type builtin_function_or_method"),
        ({"options": argparse.Namespace(a=1)}, r"config\['options'\] is of type Namespace"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, experiment = fake.comet_ml(monkeypatch)
    tracker = CometMLTracker("project")
    tracker.start()
    with pytest.raises(TrainingError, match=words):
        tracker.store_init_configuration(config)
    with pytest.raises(TrainingError, match="comet_ml cannot log 'loss': it is of type Tensor, not a number or a word"):
        tracker.log({"loss": torch.ones(2)})
    tracker.store_init_configuration({"colour": Colour.RED, Colour.RED: torch.arange(3), "number": np.int64(3)})
    assert experiment.calls == [("log_parameters", {"parameters": {"colour": "red", "red": "[0, 1, 2]", "number": 3}})]


def test_a_table_without_rows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.wandb(monkeypatch)
    tracker = WandBTracker("project")
    tracker.start()
    with pytest.raises(TrainingError, match="wandb: the table 'table' has no rows"):
        tracker.log_table("table", columns=["x"])


def test_a_missing_library_is_named_with_what_to_install() -> None:
    with pytest.raises(MissingPackageError, match="'swanlab' needs the package swanlab: pip install swanlab"):
        SwanLabTracker("project").start()
