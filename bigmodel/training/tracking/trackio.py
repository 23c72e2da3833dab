"""Trackio: runs in a local database, shown by a dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .project import ProjectTracker
from .tracker import on_main_process

__all__ = ["TrackioTracker"]


class TrackioTracker(ProjectTracker):
    """A run of Trackio; `tracker` is the `trackio.Run`.

    Args:
        run_name: the project.
        kwargs: of `trackio.init`.
    """

    name = "trackio"
    package = "trackio"

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
