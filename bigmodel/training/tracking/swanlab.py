"""SwanLab."""

from __future__ import annotations

from typing import Any

from .project import ProjectTracker
from .tracker import on_main_process
from .values import plain_leaf

__all__ = ["SwanLabTracker"]


class SwanLabTracker(ProjectTracker):
    """A run of SwanLab; `tracker` is the run that `swanlab.init` gives.

    Args:
        run_name: the project.
        kwargs: of `swanlab.init`.
    """

    name = "swanlab"
    package = "swanlab"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, words (as `swanlab.Text`) and SwanLab's own objects. `kwargs`: of the run's `log`."""
        told = {key: plain_leaf(value) for key, value in values.items()}
        text = self._library().Text
        self.tracker.log({key: text(value) if isinstance(value, str) else value for key, value in told.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name → a list of arrays or PIL images. `kwargs`: of the run's `log`."""
        image = self._library().Image
        self.tracker.log({key: [image(each) for each in images] for key, images in values.items()}, step=step, **kwargs)
