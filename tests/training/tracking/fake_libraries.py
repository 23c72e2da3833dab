"""Tracking libraries that only write down how they are called, and refuse what the real ones (as of late 2026) would not take."""

from __future__ import annotations

import inspect
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest


class Recorder:
    """Stands for objects of a library: methods have the given signatures, and every call is kept."""

    def __init__(self, signatures: dict[str, Any], gives: dict[str, Any] | None = None):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._signatures = {name: inspect.signature(like) for name, like in signatures.items()}
        self._gives = gives or {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._signatures:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = self._signatures[name].bind(*args, **kwargs).arguments
            self.calls.append((name, dict(bound)))
            return self._gives.get(name)

        return call

    def __setitem__(self, key: str, value: Any) -> None:
        self.calls.append(("set", {key: value}))


def made(kind: str) -> Any:
    """A class whose instances say of what they were made."""
    return lambda *args, **kwargs: (kind, *args, *([kwargs] if kwargs else []))


def put(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin="fake")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    run = Recorder({"log": lambda data, step=None, commit=None: 0, "finish": lambda exit_code=None: 0})
    run.config = Recorder({"update": lambda d, allow_val_change=None: 0})
    top = Recorder({"init": lambda entity=None, project=None, dir=None, name=None, tags=None, config=None, mode=None: 0}, {"init": run})
    table = made("Table")
    put(monkeypatch, "wandb", init=top.init, Image=made("Image"), Table=lambda columns=None, data=None, rows=None: table(columns, data))
    return top, run


def trackio(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    run = Recorder({"log": lambda metrics, step=None: 0, "finish": lambda: 0})
    run.config = {}
    top = Recorder({"init": lambda project, name=None, group=None, space_id=None, config=None, resume="never": 0}, {"init": run})
    table = made("Table")
    put(monkeypatch, "trackio", init=top.init, Image=made("Image"), Table=lambda columns=None, data=None, rows=None: table(columns, data))
    return top, run


def swanlab(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    run = Recorder({"log": lambda data, step=None: 0, "finish": lambda state="success", error=None: 0})
    run.config = {}
    top = Recorder({"init": lambda *, log_dir=None, mode=None, workspace=None, project=None, name=None, config=None: 0}, {"init": run})
    put(monkeypatch, "swanlab", init=top.init, Image=made("Image"), Text=made("Text"))
    return top, run


def comet_ml(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    experiment = Recorder(
        {
            "log_parameters": lambda parameters, prefix=None, step=None, nested_support=True: 0,
            "log_metrics": lambda dic, prefix=None, step=None, epoch=None, include_context=True: 0,
            "log_others": lambda dictionary: 0,
            "log_image": lambda image_data, name=None, overwrite=False, image_format="png", step=None: 0,
            "log_table": lambda filename, tabular_data=None, headers=False, **format_kwargs: 0,
            "set_step": lambda step: 0,
            "end": lambda: 0,
        }
    )
    like = {"start": lambda api_key=None, workspace=None, project=None, project_name=None, mode=None, online=None: 0}
    top = Recorder(like, {"start": experiment})
    put(monkeypatch, "comet_ml", start=top.start)
    return top, experiment


def aim(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    run = Recorder({"track": lambda value, name=None, step=None, epoch=None, *, context=None: 0, "close": lambda: 0})
    top = Recorder({"Run": lambda run_hash=None, *, repo=None, read_only=False, experiment=None: 0}, {"Run": run})
    put(monkeypatch, "aim", Run=top.Run, Image=lambda image, caption="", format="png": ("Image", image, caption), Text=made("Text"))
    return top, run


def clearml(monkeypatch: pytest.MonkeyPatch, running: bool = False) -> tuple[Recorder, Recorder]:
    logger = Recorder(
        {
            "report_scalar": lambda title, series, value, iteration: 0,
            "report_single_value": lambda name, value: 0,
            "report_text": lambda msg, level=20, print_console=True: 0,
            "report_image": lambda title, series, iteration=None, local_path=None, image=None: 0,
            "report_table": lambda title, series, iteration=None, table_plot=None, csv=None, url=None: 0,
        }
    )
    task = Recorder(
        {"connect_configuration": lambda configuration, name=None: 0, "get_logger": lambda: 0, "close": lambda: 0}, {"get_logger": logger}
    )
    like = {"init": lambda project_name=None, task_name=None, task_type=None, tags=None: 0, "current_task": lambda: 0}
    top = Recorder(like, {"init": task, "current_task": task if running else None})
    task.logger = logger
    put(monkeypatch, "clearml", Task=top)
    return top, task


def dvclive(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    live = Recorder(
        {
            "log_params": lambda params: 0,
            "log_metric": lambda name, val, timestamp=False, plot=True: 0,
            "log_image": lambda name, val: 0,
            "next_step": lambda: 0,
            "end": lambda: 0,
        }
    )
    top = Recorder({"Live": lambda dir="dvclive", resume=False, report=None, save_dvc_exp=True: 0}, {"Live": live})
    put(monkeypatch, "dvclive", Live=top.Live)
    return top, live


def mlflow(monkeypatch: pytest.MonkeyPatch, experiments: dict[str, str] | None = None) -> Recorder:
    known = experiments or {}
    active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="run 1"))
    like: dict[str, Any] = {
        "create_experiment": lambda name, artifact_location=None, tags=None: 0,
        "start_run": lambda run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None, description=None: (
            0
        ),
        "end_run": lambda status="FINISHED": 0,
        "log_params": lambda params, synchronous=None, run_id=None: 0,
        "log_metrics": lambda metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None: 0,
        "set_tags": lambda tags, synchronous=None: 0,
        "log_image": lambda image, artifact_file=None, key=None, step=None, timestamp=None, synchronous=False: 0,
        "log_table": lambda data, artifact_file, run_id=None: 0,
        "log_figure": lambda figure, artifact_file, *, save_kwargs=None: 0,
        "log_artifact": lambda local_path, artifact_path=None, run_id=None: 0,
        "log_artifacts": lambda local_dir, artifact_path=None, run_id=None: 0,
    }
    top = Recorder(like, {"create_experiment": "new", "start_run": active})
    found = {name: types.SimpleNamespace(experiment_id=number) for name, number in known.items()}
    put(monkeypatch, "mlflow", get_experiment_by_name=found.get, **{name: getattr(top, name) for name in like})
    return top
