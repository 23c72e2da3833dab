"""Which trackers a script asks for."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ...errors import IncompleteTrackerError, MissingPackageError, TrainingError
from ..enums import LoggerType
from .aim import AimTracker
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .swanlab import SwanLabTracker
from .tensorboard import TensorBoardTracker
from .tracker import GeneralTracker, Tracker, keeps_values
from .trackio import TrackioTracker
from .wandb import WandBTracker

__all__ = ["LOGGER_TYPE_TO_CLASS", "filter_trackers", "get_available_trackers", "new_tracker", "register_tracker_class"]

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    each.name: each
    for each in (
        AimTracker, ClearMLTracker, CometMLTracker, DVCLiveTracker, MLflowTracker, SwanLabTracker, TensorBoardTracker, TrackioTracker,
        WandBTracker,
    )
}  # fmt: skip
"""A tracker's name → its class; `register_tracker_class` adds to it."""


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose libraries are installed."""
    return [kind for kind in LoggerType if (cls := LOGGER_TYPE_TO_CLASS.get(str(kind))) is not None and cls.installed()]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Makes a class of trackers known by its `name`, for `log_with`; in place of another one of that name.

    It is made with the project's name, the logging directory where `requires_logging_directory`, and its part of `init_kwargs`.

    Raises `TrainingError` for what is no subclass of `GeneralTracker` with a name, and `IncompleteTrackerError` without
    `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker) and getattr(tracker_class, "name", None)):
        raise TrainingError(f"{tracker_class!r} is no subclass of GeneralTracker with a `name`.")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise IncompleteTrackerError(f"{tracker_class.__name__} is no whole tracker: give it requires_logging_directory, True or False.")
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def filter_trackers(log_with: Any, logging_dir: str | PathLike[str] | None = None) -> list[str | Tracker]:
    """The trackers of `log_with`, each once: names of classes to start, and trackers that are there already, as they are.

    Args:
        log_with: a name (`"tensorboard"`, a `LoggerType`, the name of a registered class), a tracker, or a list of them; `"all"` means
            every one whose library is installed. None: no tracker.
        logging_dir: where trackers that write files write.

    Raises:
        TrainingError: for what is no tracker, or needs a logging directory where there is none.
        MissingPackageError: a tracker's library is not installed.
    """
    given = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    chosen: list[str | Tracker] = []
    for each in given:
        several = get_available_trackers() if isinstance(each, str) and each == LoggerType.ALL else [each]
        for one in several:
            checked = _name(one, logging_dir) if isinstance(one, str) else _as_it_is(one)
            if checked not in chosen:
                chosen.append(checked)
    return chosen


def _name(given: str, logging_dir: str | PathLike[str] | None) -> str:
    name = str(given)  # a member of LoggerType has another hash than the word that it equals
    cls = LOGGER_TYPE_TO_CLASS.get(name)
    if cls is None:
        raise TrainingError(f"log_with holds {name!r}, which is no tracker; there are: {', '.join(LOGGER_TYPE_TO_CLASS)}, all.")
    if not cls.installed():
        raise MissingPackageError(f"log_with holds {name!r}, which needs the package {cls.package}: pip install {cls.package}.")
    if cls.requires_logging_directory and logging_dir is None:
        raise TrainingError(f"The tracker {name!r} writes files: say where, with project_dir or ProjectConfiguration(logging_dir=…).")
    return name


def _as_it_is(tracker: Any) -> Tracker:
    members = ("name", "tracker", "store_init_configuration", "log", "finish")
    missing = [member for member in members if member not in dir(tracker)]
    if isinstance(tracker, type) or missing:
        raise TrainingError(f"log_with holds {tracker!r}, which is no tracker: a tracker has {', '.join(members)}.")
    if not keeps_values(tracker):
        raise IncompleteTrackerError(f"log_with holds {tracker!r}, whose log does nothing: give its class a method log.")
    return tracker


def new_tracker(name: str, project_name: str, logging_dir: str | PathLike[str] | None, options: Mapping[str, Any]) -> GeneralTracker:
    """A tracker by its name, not started; `options` are further arguments of its class."""
    cls: Any = LOGGER_TYPE_TO_CLASS[name]
    return cls(project_name, logging_dir, **options) if cls.requires_logging_directory else cls(project_name, **options)
