"""What the libraries have in common whose runs belong to a project and are opened by `init`."""

from __future__ import annotations

from typing import Any, ClassVar

from .tracker import LibraryTracker, on_main_process
from .values import plain, plain_leaf

__all__ = ["ProjectTracker"]


class ProjectTracker(LibraryTracker):
    """A run that `<library>.init(project=…)` gives, with `config.update`, `log` and `finish`.

    Args:
        run_name: the project.
        kwargs: of `init`.
    """

    config_options: ClassVar[dict[str, Any]] = {}
    """Of `config.update`."""

    def __init__(self, run_name: str, **kwargs: Any):
        self.run_name = run_name
        self.init_kwargs = kwargs

    run = LibraryTracker.tracker

    def _open(self) -> Any:
        return self._library().init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, nested as they are."""
        self.tracker.config.update(plain(values, self.name), **self.config_options)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, words, dicts of them, and the library's own objects. `kwargs`: of the run's `log`."""
        self.tracker.log({key: plain_leaf(value) for key, value in values.items()}, step=step, **kwargs)

    def _close(self) -> None:
        self.tracker.finish()
