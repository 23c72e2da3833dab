"""Comet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .tables import TableTracker
from .tracker import LibraryTracker, on_main_process
from .values import flattened, numbers_and_words

__all__ = ["CometMLTracker"]


class CometMLTracker(TableTracker):
    """An experiment of Comet; `tracker` is the experiment that `comet_ml.start` gives. A table is the asset `name.csv` (`name-step.csv`).

    Args:
        run_name: the project.
        kwargs: of `comet_ml.start`.
    """

    name = "comet_ml"
    package = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any):
        self.run_name = run_name
        self.init_kwargs = kwargs

    writer = LibraryTracker.tracker

    def _open(self) -> Any:
        return self._library().start(**{"project_name": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, in one level (`optimizer/rate`)."""
        self.tracker.log_parameters(flattened(values, self.name))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, in one level; words as "other" values, which have no step. `kwargs`: of `log_metrics`."""
        found, words = numbers_and_words(values, self.name)
        if step is not None:
            self.tracker.set_step(step)
        if found:
            self.tracker.log_metrics(found, step=step, **kwargs)
        if words:
            self.tracker.log_others(words)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name → an image (array or PIL image), or a list of them. `kwargs`: of `log_image`."""
        for key, images in values.items():
            for image in images if isinstance(images, (list, tuple)) else [images]:
                self.tracker.log_image(image, name=key, step=step, **kwargs)

    def _tell_table(self, name: str, columns: list[str] | None, rows: Sequence[Sequence[Any]], step: int | None, **kwargs: Any) -> None:
        file = f"{name}.csv" if step is None else f"{name}-{step}.csv"
        self.tracker.log_table(file, tabular_data=[list(row) for row in rows], headers=columns or False, **kwargs)

    def _close(self) -> None:
        self.tracker.end()
