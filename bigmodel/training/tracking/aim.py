"""Aim: runs in a repository of files."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from .tracker import LibraryTracker, on_main_process
from .values import numbers_and_words, plain

__all__ = ["AimTracker"]


class AimTracker(LibraryTracker):
    """A run of Aim; `tracker` is the `aim.Run`.

    Args:
        run_name: the run's name.
        logging_dir: the repository.
        kwargs: of `aim.Run`.
    """

    name = "aim"
    package = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | PathLike[str] | None = ".", **kwargs: Any):
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.init_kwargs = kwargs

    writer = LibraryTracker.tracker

    def _open(self) -> Any:
        repository = None if self.logging_dir is None else str(self.logging_dir)
        run = self._library().Run(**{"repo": repository, **self.init_kwargs})
        run.name = self.run_name
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, nested as they are, under `hparams`."""
        self.tracker["hparams"] = plain(values, self.name)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, in one level, and words as texts. `kwargs`: of `Run.track`."""
        found, words = numbers_and_words(values, self.name)
        for key, value in found.items():
            self.tracker.track(value, name=key, step=step, **kwargs)
        for key, word in words.items():
            self.tracker.track(self._library().Text(word), name=key, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """A name → an array or PIL image, a pair of it and its caption, or a list of such.

        `kwargs`: `"aim_image"` → those of `aim.Image`, `"track"` → those of `Run.track`.
        """
        options = kwargs or {}
        make = self._library().Image
        for key, given in values.items():
            pairs = [each if isinstance(each, tuple) else (each, "") for each in (given if isinstance(given, list) else [given])]
            images = [make(image, caption=caption, **options.get("aim_image", {})) for image, caption in pairs]
            self.tracker.track(images if isinstance(given, list) else images[0], name=key, step=step, **options.get("track", {}))

    def _close(self) -> None:
        self.tracker.close()
