"""Settings of a training job: accumulation of gradients, compilation, data loading, and where a project's files go."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any

from ..errors import MissingPackageError, TrainingError, WrongTypeError
from ..settings import PREFIXES, environment_flag, read_variable
from ..text import kind_text
from .argument_types import refuse_wrong_fields
from .available import is_torchdata_stateful_dataloader_available
from .enums import DynamoBackend
from .handlers import KwargsHandler

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "ProjectConfiguration", "TorchDynamoPlugin", "checked_steps"]


def checked_steps(argument: str, steps: Any) -> int:
    """Batches to a step, given as `argument`. Raises `WrongTypeError` for no whole number, and `TrainingError` for fewer than one."""
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise WrongTypeError(f"{argument}={steps!r}: it takes a whole number, not {kind_text(steps)}.")
    if steps < 1:
        raise TrainingError(f"{argument}={steps}: gradients of at least 1 batch make a step.")
    return int(steps)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients of several batches are added up before the optimizer steps. Raises `TrainingError` for fewer than one."""

    num_steps: int | None = None
    """Batches to a step; None: `BIGMODEL_GRADIENT_ACCUMULATION_STEPS`, else left to the Accelerator (1)."""
    adjust_scheduler: bool = True
    """Taken for scripts that set it, and changes nothing: a scheduler counts the optimizer's steps, as in a loop without an Accelerator."""
    sync_with_dataloader: bool = True
    """The last batch of a loader ends the accumulation."""
    sync_each_batch: bool = False
    """Gradients are synchronized at every batch: less memory with sharded models, more time."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        name = "GRADIENT_ACCUMULATION_STEPS"
        if self.num_steps is None and (word := read_variable(name)):
            try:
                self.num_steps = int(word)
            except ValueError:
                raise TrainingError(f"The environment variable {PREFIXES[0]}{name} is {word!r}, not a whole number.") from None
        if self.num_steps is not None:
            checked_steps("num_steps", self.num_steps)


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled: `torch.compile(model, **plugin.to_kwargs())`. What is None is read from the environment.

    Raises `TrainingError` for an unknown backend, and for a mode together with options, which torch takes one of.
    """

    backend: DynamoBackend | None = None
    """`BIGMODEL_DYNAMO_BACKEND`, else `"NO"`, which compiles nothing; words in any case."""
    mode: str | None = None
    """`"default"`, `"reduce-overhead"`, `"max-autotune"`, `"max-autotune-no-cudagraphs"`; `BIGMODEL_DYNAMO_MODE`, else `"default"`."""
    fullgraph: bool | None = None
    """A model that does not become one graph is an error; `BIGMODEL_DYNAMO_USE_FULLGRAPH`, else False."""
    dynamic: bool | None = None
    """Shapes may vary; `BIGMODEL_DYNAMO_USE_DYNAMIC`, else None: torch finds out."""
    options: Any = None
    """A dict for the backend."""
    disable: bool = False
    """`torch.compile` does nothing, for tests."""
    use_regional_compilation: bool | None = None
    """Blocks are compiled, and those of one class share the code, instead of the whole model (see `compile_regions`);
    `BIGMODEL_DYNAMO_USE_REGIONAL_COMPILATION`, else False."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        word = str(self.backend or read_variable("DYNAMO_BACKEND") or DynamoBackend.NO)
        if word.upper() not in DynamoBackend:
            raise TrainingError(f"backend={word!r}: use one of {[each.lower() for each in DynamoBackend.list()]}.")
        self.backend = DynamoBackend(word.upper())
        if self.mode is None:
            self.mode = read_variable("DYNAMO_MODE") or "default"
        if self.fullgraph is None:
            self.fullgraph = environment_flag("DYNAMO_USE_FULLGRAPH")
        if self.dynamic is None and read_variable("DYNAMO_USE_DYNAMIC"):
            self.dynamic = environment_flag("DYNAMO_USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = environment_flag("DYNAMO_USE_REGIONAL_COMPILATION")
        if self.mode != "default" and self.options is not None:
            raise TrainingError(
                f"mode={self.mode!r} and options={self.options!r}: torch.compile takes one of them, modes are named options."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, copied, the backend in small letters."""
        return super().to_dict() | {"backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of `torch.compile`; without a `backend` where nothing shall be compiled."""
        usual = {"backend": DynamoBackend.NO, "mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
        kwargs = {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}
        if "backend" in kwargs:
            kwargs["backend"] = str(kwargs["backend"]).lower()
        return kwargs


@dataclass
class DataLoaderConfiguration:
    """How `prepare` changes data loaders.

    Raises:
        TrainingError: a seed that no sampler would use.
        MissingPackageError: a stateful loader without torchdata 0.8 or later.
    """

    split_batches: bool = False
    """A loader's batch is the whole of all processes, who share it, so its size must be a multiple of theirs; else it is that of each."""
    dispatch_batches: bool | None = None
    """The main process reads, and sends the others their part; None: for iterable data sets only."""
    even_batches: bool = True
    """Samples of the beginning are repeated at the end until all processes have batches of one size."""
    use_seedable_sampler: bool = False
    """Random samplers draw by a seed of their own, so that runs can be repeated whatever else draws numbers."""
    data_seed: int | None = None
    """The seed of that sampler; None: torch's."""
    non_blocking: bool = False
    """Batches go to the device while it computes; the loader should pin its memory."""
    use_stateful_dataloader: bool = False
    """The loader is torchdata's, which can say where it stands and resume there."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        if self.data_seed is not None and not self.use_seedable_sampler:
            raise TrainingError(f"data_seed={self.data_seed} would not be used: set use_seedable_sampler=True, or leave it out.")
        if self.use_stateful_dataloader and not is_torchdata_stateful_dataloader_available():
            raise MissingPackageError("use_stateful_dataloader=True needs torchdata 0.8.0 or later: pip install 'torchdata>=0.8.0'.")


@dataclass
class ProjectConfiguration:
    """Where a project's files go, and how its checkpoints are named. Raises `TrainingError` for numbers that make no sense."""

    project_dir: str | PathLike[str] | None = None
    """The project's folder."""
    logging_dir: str | PathLike[str] | None = None
    """The folder of trackers that write files; None: the project's."""
    automatic_checkpoint_naming: bool = False
    """`save_state` writes `checkpoints/checkpoint_{iteration}` in the project's folder, and counts."""
    total_limit: int | None = None
    """The oldest of those checkpoints go when there would be more."""
    iteration: int = 0
    """The number of the next one."""
    save_on_each_node: bool = False
    """The first process of every host writes, not only the main one: for folders that hosts do not share."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        if self.total_limit is not None and self.total_limit < 1:
            raise TrainingError(f"total_limit={self.total_limit} would keep no checkpoint; None keeps all.")
        if self.iteration < 0:
            raise TrainingError(f"iteration={self.iteration}: checkpoints are counted from 0.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | PathLike[str] | None = None) -> None:
        """Sets the project's folder, and that of logs where none was chosen."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
