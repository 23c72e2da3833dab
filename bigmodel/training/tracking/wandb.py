"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .project import ProjectTracker
from .tracker import on_main_process

__all__ = ["WandBTracker"]


class WandBTracker(ProjectTracker):
    """A run of Weights & Biases; `tracker` is the `wandb.Run`.

    Args:
        run_name: the project.
        kwargs: of `wandb.init`.
    """

    name = "wandb"
    package = "wandb"
    config_options: ClassVar[dict[str, Any]] = {"allow_val_change": True}

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name → a list of arrays or PIL images. `kwargs`: of `Run.log`."""
        image = self._library().Image
        self.tracker.log({key: [image(each) for each in images] for key, images in values.items()}, step=step, **kwargs)

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
        """A table of rows, which may hold wandb's own objects, or of a dataframe. `kwargs`: of `Run.log`."""
        names, rows = self._table(table_name, columns, data, dataframe)
        table = self._library().Table(columns=names, data=rows)
        self.tracker.log({table_name: table}, step=step, **kwargs)
