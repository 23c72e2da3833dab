"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .tracker import LibraryTracker, on_main_process
from .values import plain, plain_leaf

__all__ = ["WandBTracker"]


class WandBTracker(LibraryTracker):
    """A run of Weights & Biases; `tracker` is the `wandb.Run`.

    Args:
        run_name: the project.
        kwargs: of `wandb.init`.
    """

    name = "wandb"
    package = "wandb"

    def __init__(self, run_name: str, **kwargs: Any):
        self.run_name = run_name
        self.init_kwargs = kwargs

    run = LibraryTracker.tracker

    def _open(self) -> Any:
        return self._library().init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, nested as they are."""
        self.tracker.config.update(plain(values, self.name), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, words, dicts of them, and wandb's own objects. `kwargs`: of `Run.log`."""
        self.tracker.log({key: plain_leaf(value) for key, value in values.items()}, step=step, **kwargs)

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

    def _close(self) -> None:
        self.tracker.finish()
