"""Which trackers `log_with` means, and who starts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_libraries as fake
import pytest
from processes import Processes

import bigmodel.tracking
from bigmodel import Accelerator
from bigmodel.errors import IncompleteTrackerError, MissingPackageError, TrainingError
from bigmodel.training.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from bigmodel.utils import LoggerType


class Diary(GeneralTracker):
    """A tracker of a user's own, as documentation of such trackers writes them."""

    name = "diary"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str, cover: str = "grey"):
        self.run_name = run_name
        self.cover = cover
        self.pages: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.pages

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.pages.append((values, step))


class Folder(Diary):
    name = "folder"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Path):
        super().__init__(run_name)
        self.logging_dir = logging_dir


class Everywhere(Diary):
    name = "everywhere"
    main_process_only = False


@pytest.fixture
def registry() -> Iterator[None]:
    """Classes that a test registers are forgotten after it."""
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def test_names_members_and_trackers_are_taken_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.wandb(monkeypatch)
    diary = Diary("mine")
    chosen = filter_trackers(["wandb", LoggerType.WANDB, diary, "tensorboard", diary], tmp_path)
    assert chosen == ["wandb", diary, "tensorboard"]
    assert filter_trackers(LoggerType.TENSORBOARD, tmp_path) == [LoggerType.TENSORBOARD]
    assert filter_trackers(None) == []


def test_all_is_every_one_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = get_available_trackers()
    assert LoggerType.TENSORBOARD in before
    fake.mlflow(monkeypatch)
    fake.clearml(monkeypatch)
    diary = Diary("mine")
    chosen = filter_trackers(["all", diary], tmp_path)
    assert set(chosen[:-1]) == {str(kind) for kind in before} | {"mlflow", "clearml"}
    assert chosen[-1] is diary
    with pytest.raises(TrainingError, match="'tensorboard' writes files: say where, with project_dir"):
        filter_trackers("all")


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(TrainingError, match=r"'wandbb', which is no tracker; there are: aim, clearml, .*wandb, all"):
        filter_trackers("wandbb")
    with pytest.raises(MissingPackageError, match="'swanlab', which needs the package swanlab: pip install swanlab"):
        filter_trackers(["swanlab"])
    with pytest.raises(TrainingError, match="'tensorboard' writes files"):
        Accelerator(cpu=True, log_with="tensorboard")
    with pytest.raises(TrainingError, match=r"object object at .*, which is no tracker: a tracker has name, tracker"):
        filter_trackers(object())
    with pytest.raises(TrainingError, match="is no subclass of GeneralTracker with a `name`"):
        register_tracker_class(dict)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="is no subclass of GeneralTracker with a `name`"):
        register_tracker_class(GeneralTracker)


@pytest.mark.usefixtures("registry")
def test_a_registered_class_is_made_by_its_name(tmp_path: Path) -> None:
    for tracker_class in (Diary, Folder, Everywhere):
        register_tracker_class(tracker_class)
    with pytest.raises(TrainingError, match="'folder' writes files"):
        Accelerator(cpu=True, log_with=["diary", "folder"])
    accelerator = Accelerator(cpu=True, log_with=["diary", "folder", "everywhere"], project_dir=tmp_path)
    accelerator.init_trackers("project", config={"a": 1}, init_kwargs={"diary": {"cover": "red"}})
    diary, folder, everywhere = accelerator.trackers
    assert isinstance(diary, Diary)
    assert (diary.run_name, diary.cover) == ("project", "red")
    assert isinstance(folder, Folder)
    assert (folder.run_name, folder.logging_dir) == ("project", tmp_path)
    accelerator.log({"loss": 1.0}, step=2)
    assert everywhere.tracker == folder.tracker == diary.tracker == [({"loss": 1.0}, 2)]


def test_libraries_are_told_through_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    top, run = fake.wandb(monkeypatch)
    accelerator = Accelerator(cpu=True, log_with=LoggerType.WANDB)
    assert top.calls == []
    accelerator.init_trackers("project", config={"a": {"b": 1}}, init_kwargs={"wandb": {"name": "run"}})
    accelerator.log({"loss": 0.5}, step=1, log_kwargs={"wandb": {"commit": True}})
    assert accelerator.get_tracker("wandb", unwrap=True) is run
    accelerator.end_training()
    assert top.calls == [("init", {"project": "project", "name": "run"})]
    assert run.config.calls == [("update", {"d": {"a": {"b": 1}}, "allow_val_change": True})]
    assert run.calls == [("log", {"data": {"loss": 0.5}, "step": 1, "commit": True}), ("finish", {})]


def test_where_none_is_started_a_tracker_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    blank = accelerator.get_tracker("wandb")
    assert isinstance(blank, GeneralTracker)
    blank.store_init_configuration({"a": 1})
    blank.log({"loss": 0.5}, step=1)
    blank.log_images({}, step=1)
    blank.tracker.config.update(a=1)
    accelerator.get_tracker("wandb", unwrap=True).log({"loss": 0.5})
    blank.finish()
    assert isinstance(GeneralTracker(_blank=True), GeneralTracker)


def test_a_class_that_lacks_something_is_refused_when_it_is_made() -> None:
    class Nameless(GeneralTracker):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            pass

    class Mute(GeneralTracker):
        name = "mute"
        requires_logging_directory = False
        tracker = None

    class MuteWithoutInit(Mute):
        def __init__(self) -> None:
            pass

    class Whole(Mute):
        name = "whole"
        told: Any = None

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            super().log(values, step)
            self.told = values

    with pytest.raises(NotImplementedError, match="Nameless is no whole tracker: give its class name, requires_logging_directory, tracker"):
        Nameless()
    with pytest.raises(NotImplementedError, match="Mute is no whole tracker: give its class log"):
        Mute()
    with pytest.raises(IncompleteTrackerError, match=r"MuteWithoutInit object.* whose log does nothing"):
        Accelerator(cpu=True, log_with=MuteWithoutInit())
    whole = Whole()
    accelerator = Accelerator(cpu=True, log_with=whole)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0})
    assert whole.told == {"loss": 1.0}

    class Nowhere(GeneralTracker):
        name = "nowhere"

    with pytest.raises(IncompleteTrackerError, match="Nowhere is no whole tracker: give it requires_logging_directory"):
        register_tracker_class(Nowhere)


def _in_two_processes(folder: str) -> tuple[list[str], Any, Any]:
    mine = Diary("mine")
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", mine, Everywhere("other")], project_dir=folder)
    accelerator.init_trackers("run", config={"a": 1})
    accelerator.log({"loss": 0.5}, step=accelerator.process_index)
    accelerator.get_tracker("tensorboard").log_images({}, step=1)
    names = [tracker.name for tracker in accelerator.trackers]
    told = accelerator.get_tracker("everywhere").tracker
    for tracker in accelerator.trackers:
        tracker.finish()
    return names, told, getattr(mine, "pages", None)


@pytest.mark.xdist_group("processes")
def test_other_processes_start_only_what_is_for_all(processes: Callable[[int], Processes], tmp_path: Path) -> None:
    first, second = processes(2).run(_in_two_processes, str(tmp_path))
    assert first == (["tensorboard", "diary", "everywhere"], [({"loss": 0.5}, 0)], [({"loss": 0.5}, 0)])
    assert second == (["everywhere"], [({"loss": 0.5}, 1)], None)
    assert len([file for file in (tmp_path / "run").iterdir() if "tfevents" in file.name]) == 1


def test_the_names_that_scripts_import() -> None:
    assert bigmodel.tracking.GeneralTracker is GeneralTracker
    assert bigmodel.tracking.filter_trackers is filter_trackers
    assert set(LOGGER_TYPE_TO_CLASS) == {kind for kind in LoggerType.list() if kind != "all"}
