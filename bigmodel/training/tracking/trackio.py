"""Trackio: runs in a local database, shown by a dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .project import ProjectTracker
from .tables import TableTracker
from .tracker import on_main_process

__all__ = ["TrackioTracker"]


class TrackioTracker(TableTracker, ProjectTracker):
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

    def _tell_table(self, name: str, columns: list[str] | None, rows: Sequence[Sequence[Any]], step: int | None, **kwargs: Any) -> None:
        table = self._library().Table(columns=columns, data=[list(row) for row in rows])
        self.tracker.log({name: table}, step=step, **kwargs)
