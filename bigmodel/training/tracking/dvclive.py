"""DVCLive: metrics in files beside the code."""

from __future__ import annotations

from typing import Any

from .tracker import LibraryTracker, on_main_process
from .values import numbers, plain

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(LibraryTracker):
    """A `dvclive.Live`, which `tracker` is; the project's name is not used.

    Args:
        run_name: not used.
        live: a `Live` that is there already.
        kwargs: of `Live`.
    """

    name = "dvclive"
    package = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any):
        self._given = live
        self.init_kwargs = kwargs

    live = LibraryTracker.tracker

    def _open(self) -> Any:
        return self._library().Live(**self.init_kwargs) if self._given is None else self._given

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, nested as they are."""
        self.tracker.log_params(plain(values, self.name))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, in one level; the step goes on by one where none is given. `kwargs`: of `Live.log_metric`."""
        if step is not None:
            self.tracker.step = step
        for key, value in numbers(values, self.name).items():
            self.tracker.log_metric(key, value, **kwargs)
        self.tracker.next_step()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name (`.png` is added where it has no ending) → an image (array, PIL image or path). `kwargs`: of `Live.log_image`."""
        if step is not None:
            self.tracker.step = step
        for key, image in values.items():
            self.tracker.log_image(key if "." in key else f"{key}.png", image, **kwargs)

    def _close(self) -> None:
        self.tracker.end()
