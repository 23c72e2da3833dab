"""The part of `Accelerator` that tells experiment trackers how the run goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import TrainingError
from .accelerator_state import AcceleratorState

__all__ = ["Tracker", "TrackerChoice", "TrackingMethods", "chosen_trackers"]


class Tracker(Protocol):
    """What is asked of a tracker. `main_process_only = False` on its class means one in every process."""

    name: str

    @property
    def tracker(self) -> Any:
        """The library's own object."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, once."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and words, at a step."""

    def finish(self) -> None:
        """The run is over."""


@dataclass(frozen=True, slots=True)
class TrackerChoice:
    """A tracker that was asked for, before it is started."""

    name: str
    main_process_only: bool
    start: Callable[[str, Mapping[str, Any]], Tracker]
    """Gives the tracker, from the project's name and the arguments of `init_kwargs` for it."""


def chosen_trackers(log_with: Any) -> list[TrackerChoice]:
    """The trackers of `log_with`: one, or several in a list. Raises `TrainingError` for what is none."""
    given = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    return [_as_it_is(each) for each in given]


def _as_it_is(tracker: Any) -> TrackerChoice:
    methods = ("name", "store_init_configuration", "log", "finish")
    if isinstance(tracker, type) or not all(hasattr(tracker, method) for method in methods):
        raise TrainingError(f"log_with holds {tracker!r}, which is no tracker: a tracker has {', '.join(methods)}.")
    return TrackerChoice(tracker.name, getattr(tracker, "main_process_only", True), lambda project_name, kwargs: tracker)


class _Silent:
    """Stands for a tracker in processes that have none: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> _Silent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silent:
        return self


class TrackingMethods:
    """Trackers of the main process, or of all where a tracker says so."""

    state: AcceleratorState
    log_with: list[TrackerChoice]
    trackers: list[Tracker]

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Starts the trackers of `log_with`.

        Args:
            project_name: the run's or the project's name, as each library calls it.
            config: hyperparameters, told to every tracker.
            init_kwargs: a tracker's name → further arguments of its class: `{"wandb": {"tags": ["first"]}}`.
        """
        here = [choice for choice in self.log_with if self.state.is_main_process or not choice.main_process_only]
        self.trackers = [choice.start(project_name, (init_kwargs or {}).get(choice.name, {})) for choice in here]
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name; with `unwrap`, its library's own object. Processes that have none get one that does nothing.

        Raises `TrainingError` for a name that was not asked for, or before `init_trackers`.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.state.is_main_process and any(choice.name == name for choice in self.log_with):
            return _Silent()
        started = ", ".join(repr(tracker.name) for tracker in self.trackers) or "none"
        raise TrainingError(f"There is no tracker {name!r}; started by init_trackers: {started}. Name it in log_with.")

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Tells every tracker some values. `log_kwargs`: a tracker's name → further arguments of its `log`."""
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """The run is over: every tracker writes what it has, and the process group, where there is one, ends."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.state.destroy_process_group()
