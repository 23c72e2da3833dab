"""The part of `Accelerator` that is about files: the state of the job, the model for others, and what users add to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import TrainingError
from .accelerator_state import AcceleratorState
from .argument_types import wrong_thing
from .checkpoint import load_training_state, save_training_state
from .checkpoint_folder import together
from .configuration import ProjectConfiguration
from .parallel import save

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .strategy import Strategy

__all__ = ["SavingMethods"]


class SavingMethods:
    """Saving and loading; `checkpoint` does the work."""

    state: AcceleratorState
    strategy: Strategy
    project_configuration: ProjectConfiguration
    _custom_objects: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]]

    @property
    def project_dir(self) -> str | PathLike[str] | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | PathLike[str] | None:
        """The folder of trackers that write files."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is named automatically."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process takes part in writing a model: the main one, and each that holds a part of it."""
        return self.is_main_process or self.strategy.is_sharded

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def _writes_files(self) -> bool:
        """Whether this process writes what is the same in all: the main one, or one on each host that has folders of its own."""
        return self.state.is_local_main_process if self.project_configuration.save_on_each_node else self.state.is_main_process

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """`utils.save`, by the main process (with `save_on_each_node` by one on each host)."""
        save(obj, f, save_on_each_node=self.project_configuration.save_on_each_node, safe_serialization=safe_serialization)

    def save_state(
        self, output_dir: str | PathLike[str] | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Saves all that it takes to go on as if the job had not stopped, in one folder. All processes call it.

        Models, optimizers, schedulers, the gradient scaler, the random states of every process, the positions of data loaders, and what was
        registered. The folder appears when it is complete; an error in any process leaves what was there before. A folder that exists is
        replaced (files that no save has put there stay in it).

        Args:
            output_dir: the folder; not needed, and not used, with `ProjectConfiguration(automatic_checkpoint_naming=True)`, which
                names `checkpoints/checkpoint_{iteration}` in `project_dir` and keeps the latest `total_limit`.
            safe_serialization: weights as safetensors; False: as `torch.save` writes them.
            save_model_func_kwargs: for the strategy that the model is spread by.

        Returns the folder, as it was given (`~` is the user's own).

        Raises:
            TrainingError: no folder, a numbered one that exists, a state that could not be read back, or another process that failed.
            CheckpointError: a folder that cannot be written.
        """
        return save_training_state(self._whole, output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self, input_dir: str | PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Goes on from a folder of `save_state`: call it when everything is prepared and registered, in the order in which it was saved.

        A loader that was in the middle of an epoch begins with the first batch that it had not handed out then.

        Args:
            input_dir: the folder; None: the latest one, with `automatic_checkpoint_naming`.
            load_kwargs: `{"map_location": …}` for optimizer states: a device, or `"on_device"` for this process's; by default the host.
            load_model_func_kwargs: for `Module.load_state_dict`, such as `strict=False`.

        Raises:
            CheckpointNotFoundError: no folder, or nothing in it for something that is prepared.
            MatchError: weights that are not the model's.
            CheckpointError: a folder that was not copied completely.
            TrainingError: a file that would run code, other objects registered than were saved, or another process that failed.
        """
        load_training_state(self._whole, input_dir, load_kwargs, **load_model_func_kwargs)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """`bigmodel.save_model` of a model, prepared or not: shards that other programs read. All processes call it."""
        with together("save_model"):
            if not isinstance(model, nn.Module):
                raise wrong_thing("save_model", "a model (nn.Module)", model)
            self.strategy.save_weights(model, Path(save_directory), max_shard_size, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All values of the model, complete in the main process; names are those of the unwrapped model, or with `unwrap=False` its own."""
        if not isinstance(model, nn.Module):
            raise wrong_thing("get_state_dict", "a model (nn.Module)", model)
        return self.strategy.state_dict(model, unwrap)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """`save_state` and `load_state` take these objects too; `TrainingError` for one without `state_dict` and `load_state_dict`."""
        lacking = [type(thing).__name__ for thing in objects if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"))]
        if lacking:
            raise TrainingError(f"{', '.join(lacking)} cannot be registered: objects need state_dict() and load_state_dict(state).")
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(models, weights, output_dir)` runs in all processes before `save_state` writes; what it takes off the lists is not written.

        `output_dir` is where the hook may write files of its own, which become part of the state.
        """
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """`hook(models, input_dir)` runs in all processes before `load_state` reads; models that it takes off the list are not filled."""
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    @property
    def _whole(self) -> Accelerator:
        return cast("Accelerator", self)
