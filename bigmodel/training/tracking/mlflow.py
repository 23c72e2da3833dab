"""MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from os import PathLike
from typing import Any

from ..environment import str_to_bool
from .tables import TableTracker
from .tracker import LibraryTracker, on_main_process
from .values import flattened, numbers_and_words

__all__ = ["MLflowTracker"]

PARAMS_AT_ONCE = 100
"""The most parameters of one request: <https://mlflow.org/docs/latest/api_reference/rest-api.html#log-batch>."""


class MLflowTracker(TableTracker):
    """A run of MLflow; `tracker` is the `mlflow.ActiveRun`. A table is the artifact `name.json`, a step a column of it.

    Args:
        experiment_name: made if there is none of that name; `MLFLOW_EXPERIMENT_NAME` in the environment is stronger.
        logging_dir: where artifacts of a new experiment go; None: as the server says.
        run_id: a run to go on with; `MLFLOW_RUN_ID` is stronger.
        tags: of the run, a dict or its JSON; `MLFLOW_TAGS` is stronger.
        nested_run: the run is part of one that is active; `MLFLOW_NESTED_RUN` is stronger.
        run_name, description: of a new run.
    """

    name = "mlflow"
    package = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ):
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        tags = os.environ.get("MLFLOW_TAGS", tags)
        self.tags: Mapping[str, Any] | None = json.loads(tags) if isinstance(tags, str) else tags
        nested = os.environ.get("MLFLOW_NESTED_RUN")
        self.nested_run = nested_run if nested is None else bool(str_to_bool(nested))
        self.run_name = run_name
        self.description = description

    active_run = LibraryTracker.tracker

    def _open(self) -> Any:
        mlflow = self._library()
        experiment_id = None
        if self.experiment_name is not None:
            experiment = mlflow.get_experiment_by_name(self.experiment_name)
            if experiment is None:
                location = None if self.logging_dir is None else os.fspath(self.logging_dir)
                experiment_id = mlflow.create_experiment(self.experiment_name, artifact_location=location, tags=self.tags)
            else:
                experiment_id = experiment.experiment_id
        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def _run_id(self) -> str:
        return self.tracker.info.run_id

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, in one level (`optimizer/rate`); MLflow keeps them as text."""
        rest = iter(flattened(values, self.name).items())
        while some := dict(islice(rest, PARAMS_AT_ONCE)):
            self._library().log_params(some, run_id=self._run_id)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics, in one level; words as tags of the run, which have no step. `kwargs`: of `mlflow.log_metrics`."""
        found, words = numbers_and_words(values, self.name)
        self._library().log_metrics(found, **{"step": step, "run_id": self._run_id, **kwargs})
        if words:
            self._library().set_tags(words)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A name → an array `[H, W]` or `[H, W, C]` or a PIL image, or a list of them. `kwargs`: of `mlflow.log_image`."""
        for key, images in values.items():
            for image in images if isinstance(images, (list, tuple)) else [images]:
                self._library().log_image(image, key=key, step=step, **kwargs)

    def _tell_table(self, name: str, columns: list[str] | None, rows: Sequence[Sequence[Any]], step: int | None, **kwargs: Any) -> None:
        names = columns or [f"column {index}" for index in range(len(rows[0]) if rows else 0)]
        table: dict[str, list[Any]] = {each: [row[index] for row in rows] for index, each in enumerate(names)}
        if step is not None:
            table["step"] = [step] * len(rows)
        self._library().log_table(table, f"{name}.json", **{"run_id": self._run_id, **kwargs})

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """A figure of matplotlib or plotly, as an artifact of the active run."""
        self._library().log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """A file, as an artifact in the folder `artifact_path`."""
        self._library().log_artifact(local_path, artifact_path=artifact_path, run_id=self._run_id)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """All files of a folder, as artifacts in the folder `artifact_path`."""
        self._library().log_artifacts(local_dir, artifact_path=artifact_path, run_id=self._run_id)

    def _close(self) -> None:
        self._library().end_run()
