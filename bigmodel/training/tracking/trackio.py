"""Trackio: runs in a local database, shown by a dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .tracker import LibraryTracker, on_main_process
from .values import plain, plain_leaf

__all__ = ["TrackioTracker"]


class TrackioTracker(LibraryTracker):
    """A run of Trackio; `tracker` is the `trackio.Run`.

    Args:
        run_name: the project.
        kwargs: of `trackio.init`.
    """

    name = "trackio"
    package = "trackio"

    def __init__(self, run_name: str, **kwargs: Any):
        self.run_name = run_name
        self.init_kwargs = kwargs

    run = LibraryTracker.tracker

    def _open(self) -> Any:
        return self._library().init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, nested as they are."""
        self.tracker.config.update(plain(values, self.name))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, words, dicts of them, and trackio's own objects. `kwargs`: of `Run.log`."""
        self.tracker.log({key: plain_leaf(value) for key, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name → an array or PIL image, or a list of them, told as `name/0`, `name/1`, … . `kwargs`: of `Run.log`."""
        image = self._library().Image
        named: dict[str, Any] = {}
        for key, given in values.items():
            several = isinstance(given, (list, tuple)) and len(given) != 1
            images = given if isinstance(given, (list, tuple)) else [given]
            named.update({f"{key}/{index}" if several else key: image(each) for index, each in enumerate(images)})
        self.tracker.log(named, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table of rows or of a dataframe. `kwargs`: of `Run.log`."""
        names, rows = self._table(table_name, columns, data, dataframe)
        self.tracker.log({table_name: self._library().Table(columns=names, data=[list(row) for row in rows])}, step=step, **kwargs)

    def _close(self) -> None:
        self.tracker.finish()
