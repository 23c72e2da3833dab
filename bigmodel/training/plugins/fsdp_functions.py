"""Sharded models and optimizers in files, for scripts that save them themselves, and what such folders are made into."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import CheckpointError, TrainingError
from ...loading import Checkpoint, read_tensors
from ...loading import save_model as write_model
from ..checkpoint_folder import together
from ..parallel import is_peft_model
from ..state import PartialState
from .fsdp import FullyShardedDataParallelPlugin
from .fsdp_files import Shapes, parts_folder

if TYPE_CHECKING:
    from ..accelerator import Accelerator
    from .fsdp_strategy import FullyShardedStrategy

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

PREFIX = "model."
"""What names of tensors begin with in the folder of a model."""


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Makes the parts that the processes of a job have written one model, with one tensor in memory at a time; needs no processes.

    Args:
        checkpoint_dir: the folder of a `save_state` with `SHARDED_STATE_DICT`, or its `pytorch_model_fsdp_0`.
        output_path: folder for `model.safetensors`, or shards and their index.
        safe_serialization: False writes torch's format.
        remove_checkpoint_dir: removes the folder when the model is there.

    In a job, the main process does it and the others wait.

    Raises `CheckpointError` for a folder with anything else in it.
    """
    state = PartialState()
    if state.is_main_process:
        folder = Path(checkpoint_dir)
        inner = parts_folder("model", 0, folder)
        checkpoint = Checkpoint.open(inner if inner.is_dir() else folder)
        names = {name.removeprefix(PREFIX): name for name in checkpoint.entries if name.startswith(PREFIX)}
        if not names:
            raise CheckpointError(f"{folder} holds no parts of a model: none of its tensors is below {PREFIX!r}.")
        empty = {
            plain: torch.empty(checkpoint.entries[name].shape, dtype=checkpoint.entries[name].dtype, device="meta")
            for plain, name in names.items()
        }
        write_model(
            Shapes(empty),
            Path(output_path),
            safe_serialization=safe_serialization,
            fetch=lambda plain: read_tensors(checkpoint, [names[plain]])[names[plain]],
        )
        if remove_checkpoint_dir:
            shutil.rmtree(folder)
    state.wait_for_everyone()


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes a prepared model as `save_state` does; all processes call it. `use_dcp` is accepted: `state_dict_type` decides.

    With `adapter_only`, of a PEFT model only the adapters are written, under their names in the model. Any other model is written whole.
    """
    strategy = _strategy(fsdp_plugin, accelerator)
    folder = _made(accelerator, output_dir)
    state = strategy.state_to_save(model)
    if adapter_only and is_peft_model(model):
        state = _adapters(model, state)
    strategy.save_model(model, model_index, state, folder, True)
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Fills a prepared model from what `save_fsdp_model` or `save_state` wrote; all processes call it.

    With `adapter_only`, of a PEFT model what the files lack stays as it is.
    """
    partial = {"strict": False} if adapter_only and is_peft_model(model) else {}
    _strategy(fsdp_plugin, accelerator).load_model(model, model_index, Path(input_dir), **partial)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes a prepared optimizer as `save_state` does; all processes call it. Its models are known, `model` is accepted."""
    _strategy(fsdp_plugin, accelerator).save_optimizer(optimizer, optimizer_index, _made(accelerator, output_dir))
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Fills a prepared optimizer from what `save_fsdp_optimizer` or `save_state` wrote; all processes call it.

    `adapter_only` is accepted: an optimizer has states of what it trains and of nothing else.
    """
    _strategy(fsdp_plugin, accelerator).load_optimizer(optimizer, optimizer_index, Path(input_dir), "cpu")


def enable_fsdp_ram_efficient_loading() -> None:
    """transformers' `from_pretrained` loads weights in the main process alone; for `cpu_ram_efficient_loading`."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"


def disable_fsdp_ram_efficient_loading() -> None:
    """transformers' `from_pretrained` loads weights in every process."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def _adapters(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Those values of `state` that are the model's adapters, under the same names: PEFT, which tells them, renames them."""
    from peft import get_peft_model_state_dict

    if not state:  # another process has the values
        return state
    values = get_peft_model_state_dict(model, state_dict=state).values()
    wanted = {id(value) for value in values}
    return {name: value for name, value in state.items() if id(value) in wanted}


def _strategy(plugin: FullyShardedDataParallelPlugin, accelerator: Accelerator) -> FullyShardedStrategy:
    strategy: Any = accelerator.strategy
    if getattr(strategy, "plugin", None) is not plugin:
        raise TrainingError("fsdp_plugin is not the accelerator's own: give accelerator.state.fsdp_plugin.")
    return strategy


def _made(accelerator: Accelerator, folder: str | os.PathLike[str]) -> Path:
    made = Path(folder)
    with together(f"Making {made}"):
        if accelerator._writes_files:
            made.mkdir(parents=True, exist_ok=True)
    return made
