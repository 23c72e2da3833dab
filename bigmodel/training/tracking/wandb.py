"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .project import ProjectTracker
from .tables import TableTracker
from .tracker import on_main_process

__all__ = ["WandBTracker"]


class WandBTracker(TableTracker, ProjectTracker):
    """A run of Weights & Biases; `tracker` is the `wandb.Run`. Tables may hold wandb's own objects.

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

    def _tell_table(self, name: str, columns: list[str] | None, rows: Sequence[Sequence[Any]], step: int | None, **kwargs: Any) -> None:
        self.tracker.log({name: self._library().Table(columns=columns, data=rows)}, step=step, **kwargs)
