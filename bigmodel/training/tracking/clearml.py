"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .tables import TableTracker
from .tracker import LibraryTracker, on_main_process
from .values import numbers_and_words, plain

__all__ = ["ClearMLTracker"]


class ClearMLTracker(TableTracker):
    """A task of ClearML; `tracker` is the `clearml.Task`. A task that runs already is taken, and not closed at the end.

    Names that begin with `train_`, `eval_` or `test_` are series of one chart. The first row of a table without columns is its heading.

    Args:
        run_name: project and task, where `CLEARML_PROJECT` and `CLEARML_TASK` in the environment say nothing.
        kwargs: of `Task.init`.
    """

    name = "clearml"
    package = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any):
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._own = True

    task = LibraryTracker.tracker

    def _open(self) -> Any:
        task = self._library().Task
        running = task.current_task()
        self._own = running is None
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.run_name),
        }
        return task.init(**{**names, **self.init_kwargs}) if running is None else running

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, nested as they are: the task's configuration."""
        self.tracker.connect_configuration(plain(values, self.name))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars of a step, or single values without one; words as lines of the log.

        `kwargs`: of `Logger.report_scalar` or `Logger.report_single_value`.
        """
        found, words = numbers_and_words(values, self.name)
        logger = self.tracker.get_logger()
        for key, value in found.items():
            if step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _chart(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        for key, word in words.items():
            logger.report_text(f"{key}: {word}" if step is None else f"{key} ({step}): {word}")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name → an image (array or PIL image), or a list of them. `kwargs`: of `Logger.report_image`."""
        for key, given in values.items():
            title, series = _chart(key)
            images = given if isinstance(given, (list, tuple)) else [given]
            for index, image in enumerate(images):
                own = series if len(images) == 1 else f"{series} {index}"
                self.tracker.get_logger().report_image(title=title, series=own, iteration=step, image=image, **kwargs)

    def _tell_table(self, name: str, columns: list[str] | None, rows: Sequence[Sequence[Any]], step: int | None, **kwargs: Any) -> None:
        title, series = _chart(name)
        whole = [list(row) for row in rows] if columns is None else [columns, *(list(row) for row in rows)]
        self.tracker.get_logger().report_table(title=title, series=series, iteration=step, table_plot=whole, **kwargs)

    def _close(self) -> None:
        if self._own:
            self.tracker.close()


def _chart(name: str) -> tuple[str, str]:
    """The chart and the line in it that values of this name go to."""
    series, separator, title = name.partition("_")
    return (title, series) if separator and series in ("eval", "test", "train") else (name, "train")
