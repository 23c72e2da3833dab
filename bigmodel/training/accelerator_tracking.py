"""The part of `Accelerator` that tells experiment trackers how the run goes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import TrainingError
from .accelerator_state import AcceleratorState
from .argument_types import wrong_thing
from .configuration import ProjectConfiguration
from .tracking.chosen import LOGGER_TYPE_TO_CLASS, new_tracker
from .tracking.tracker import BlankTracker, Tracker

__all__ = ["TrackingMethods"]


class TrackingMethods:
    """Trackers of the main process, or of all where a tracker says so."""

    state: AcceleratorState
    project_configuration: ProjectConfiguration
    log_with: list[str | Tracker]
    trackers: list[Tracker]

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Starts the trackers of `log_with`; see `GeneralTracker` for trackers of your own.

        Args:
            project_name: the run's or the project's name, as each library calls it.
            config: hyperparameters, told to every tracker.
            init_kwargs: a tracker's name → further arguments of its class: `{"wandb": {"tags": ["first"]}}`.
        """
        if config is not None and not isinstance(config, Mapping):
            raise wrong_thing("init_trackers", "a config of names and values", config)
        self.trackers = []
        for chosen in self.log_with:
            kind: Any = LOGGER_TYPE_TO_CLASS[chosen] if isinstance(chosen, str) else chosen
            if not self.state.is_main_process and getattr(kind, "main_process_only", True):
                continue
            tracker: Any = (
                new_tracker(chosen, project_name, self.project_configuration.logging_dir, (init_kwargs or {}).get(chosen, {}))
                if isinstance(chosen, str)
                else chosen
            )
            if hasattr(tracker, "start"):
                tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name; with `unwrap`, its library's own object.

        Where none is started (in other processes than the main one, without `log_with`, before `init_trackers`, after `end_training`) it is
        one that does nothing. Raises `TrainingError` for another name than those that are started.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        elsewhere = [] if self.state.is_main_process else [chosen if isinstance(chosen, str) else chosen.name for chosen in self.log_with]
        if not self.trackers or name in elsewhere:
            return BlankTracker()
        started = ", ".join(repr(tracker.name) for tracker in self.trackers)
        raise TrainingError(f"There is no tracker {name!r}; started by init_trackers: {started}. Name it in log_with.")

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Tells every tracker some values. `log_kwargs`: a tracker's name → further arguments of its `log`. Warns where none is started."""
        if not isinstance(values, Mapping):
            raise wrong_thing("log", "values by name, such as {'loss': 0.5}", values)
        if self.log_with and not self.trackers and self.state.is_main_process:
            warnings.warn("log: no tracker of log_with is started, so nothing keeps the values: call init_trackers first.", stacklevel=2)
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """The run is over: every tracker writes what it has, and the process group, where there is one, ends."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.state.destroy_process_group()
