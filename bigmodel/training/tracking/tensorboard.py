"""TensorBoard: event files, written by torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from ..available import is_package_available, is_tensorboard_available
from .tracker import LibraryTracker, library, on_main_process
from .values import flattened, numbers, plain, plain_leaf

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(LibraryTracker):
    """Event files in `logging_dir/run_name`; `tracker` is the `torch.utils.tensorboard.SummaryWriter`.

    Args:
        run_name: the folder of this run.
        logging_dir: the folder that `tensorboard --logdir` shows.
        kwargs: of `SummaryWriter`.
    """

    name = "tensorboard"
    package = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | PathLike[str], **kwargs: Any):
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    writer = LibraryTracker.tracker

    def _open(self) -> Any:
        module = "torch.utils.tensorboard" if is_package_available(self.package) else "tensorboardX"
        return library(module, self.name).SummaryWriter(self.logging_dir, **self.init_kwargs)

    @classmethod
    def installed(cls) -> bool:
        """Whether `tensorboard` or `tensorboardX` is there."""
        return is_tensorboard_available()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, for TensorBoard's own page, and in `hparams.yml` in the run's folder."""
        flat = {key: str(value) if value is None else value for key, value in flattened(values, self.name).items()}
        self.tracker.add_hparams(flat, metric_dict={}, run_name="hparams")
        self.tracker.flush()
        with open(Path(self.logging_dir) / "hparams.yml", "w", encoding="utf-8") as stream:
            yaml.safe_dump(plain(values, self.name), stream, sort_keys=False)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, words as text, a dict of numbers as scalars in one chart.

        `kwargs`: of `SummaryWriter.add_scalar`, `add_text` or `add_scalars`.
        """
        for key, value in values.items():
            value = plain_leaf(value)
            if isinstance(value, str):
                self.tracker.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.tracker.add_scalars(key, numbers(value, self.name), global_step=step, **kwargs)
            else:
                self.tracker.add_scalar(key, numbers({key: value}, self.name)[key], global_step=step, **kwargs)
        self.tracker.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, `[N, C, H, W]` or as `dataformats` says. `kwargs`: of `add_images`."""
        for key, value in values.items():
            self.tracker.add_images(key, value, global_step=step, **kwargs)

    def _close(self) -> None:
        self.tracker.close()
