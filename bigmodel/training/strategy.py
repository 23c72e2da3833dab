"""How a model is spread over processes: what `Accelerator` leaves to DDP, FSDP, DeepSpeed or Megatron-LM, in one small protocol.

`Strategy` itself is the plain one: a copy in each process, with gradients averaged by `DistributedDataParallel` where there are several.
Others derive from it and override what differs. Each lives in a file of its own below `plugins/`, named in `STRATEGIES`, and is imported
when its `DistributedType` is trained with. All processes call every method, in the same order.

What an `Accelerator` calls, and when:

- `prepare(objects, placements)`: once per `Accelerator.prepare`, with everything given to it at once, for engines that join model and
  optimizer. It returns as many objects, in the order given. By default each one goes through the accelerator's own `prepare_model`,
  `prepare_optimizer`, `prepare_data_loader` or `prepare_scheduler`, schedulers last; an override may call these, or
  `preparing.prepare_each`, and must add models, optimizers and schedulers that it makes itself to `accelerator._models`, `_optimizers`
  and `_schedulers`, which `save_state` walks in that order.
- `prepare_model(model, device_placement, evaluation_mode)`: one model, wrapped for its forwards.
- `adopt_parameters(optimizer)`: one optimizer, before it is wrapped.
- `backward(loss)`: the loss is divided by the accumulated batches already (unless `divides_losses` is False) and not scaled yet.
- `no_sync(model)`, `sync_in_backward(model)`, `join(models)`: when gradients travel.
- `clip_grad_norm_`, `clip_grad_value_`: gradients are unscaled already; the norm is that of the whole model, over all processes.
- `unwrap`, `state_dict`: the user's own model and all its values, under the names of the unwrapped model.
- `save_model`, `load_model`, `save_optimizer`, `load_optimizer`: files of `save_state` for the model or optimizer of that index, in a
  folder that all processes of a host share. A saver writes only there; the folder appears under its name when all have returned.
- `save_weights`: files for `save_model`, that any program can read.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ..api import save_model as save_streaming
from ..errors import TrainingError
from .data.mesh import data_shares
from .enums import DistributedType
from .parallel import extract_model_from_parallel
from .preparing import prepare_each
from .replicated import prepare_copy, sync_in_backward
from .training_files import (
    load_optimizer_file,
    load_weights_file,
    named_plainly,
    save_optimizer_file,
    save_weights_file,
)

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["STRATEGIES", "Strategy", "strategy_for"]

STRATEGIES: Final = {
    DistributedType.FSDP: ("plugins.fsdp_strategy", "FullyShardedStrategy"),
    DistributedType.DEEPSPEED: ("plugins.deepspeed_strategy", "DeepSpeedStrategy"),
    DistributedType.MEGATRON_LM: ("plugins.megatron_strategy", "MegatronStrategy"),
}
"""Module, relative to this room, and class."""


class Strategy:
    """One copy of the model in each process."""

    scales_losses: bool = True
    """Whether the accelerator's `GradScaler` takes part where the precision is fp16."""
    is_sharded: bool = False
    """Whether every process writes a part of the model."""
    divides_losses: bool = True
    """Whether `Accelerator.backward` divides losses by the number of accumulated batches."""
    keeps_gradients: bool = True
    """Whether gradients that are being accumulated are the parameters' own, whole, so that they can be saved with a state."""

    data_mesh: Any = None
    """The `DeviceMesh` that tells which processes see the same samples; None: each sees its own."""
    data_ranks: Sequence[int] | None = None
    """One process, by rank, of those that see the same samples; None: each sees its own."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        config = accelerator.parallelism_config
        if config is not None and config.cp_enabled:
            self.data_mesh = accelerator.torch_device_mesh
            share_of = data_shares(self.data_mesh)
            self.data_ranks = [share_of.index(share) for share in range(max(share_of) + 1)]

    @property
    def data_processes(self) -> int:
        """How many processes see samples of their own."""
        return self.accelerator.num_processes if self.data_ranks is None else len(self.data_ranks)

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """The objects of one `Accelerator.prepare`, ready for the loop. A placement of None means the accelerator's `device_placement`."""
        return prepare_each(self.accelerator, objects, placements)

    def prepare_model(self, model: nn.Module, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """The model on its device, in its precision, wrapped to average gradients, compiled. `evaluation_mode`: no gradients."""
        return prepare_copy(self.accelerator, model, device_placement, evaluation_mode)

    def adopt_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer, made before its model was prepared, trains the parameters that the model has now."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of `loss`; `kwargs` as in `Tensor.backward`."""
        scale = self.accelerator.loss_scale
        if scale is not None:
            loss = scale.scaled(loss)
        loss.backward(**kwargs)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Backwards of the model inside keep their gradients in this process."""
        # Asking a module for what it does not have is slow.
        no_sync = getattr(model, "no_sync", None) if self.accelerator.use_distributed else None
        return contextlib.nullcontext() if no_sync is None else no_sync()

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Backwards inside average gradients although their forward was inside `no_sync`."""
        return sync_in_backward(model)

    def join(self, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        """Processes that have run out of batches answer the collectives of those that have not."""
        from torch.distributed.algorithms.join import Join, Joinable

        models = [model if isinstance(model, Joinable) else getattr(model, "_orig_mod", model) for model in models]
        strangers = [type(model).__name__ for model in models if not isinstance(model, Joinable)]
        if strangers:
            raise TrainingError(
                f"{', '.join(strangers)} cannot be joined: give what `prepare` returned for a model with trainable parameters."
            )
        return Join([model for model in models if isinstance(model, Joinable)], throw_on_early_termination=False)

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Scales gradients down to a common norm of at most `max_norm`. Returns the norm before, a tensor of no dimensions."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cuts every gradient to `[-clip_value, clip_value]`."""
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        if with_gradients:  # torch does not take none at all
            torch.nn.utils.clip_grad_value_(with_gradients, clip_value)

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """The user's own model."""
        return extract_model_from_parallel(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All values of the model; complete in the main process at least."""
        return named_plainly(self.unwrap(model, keep_torch_compile=False)) if unwrap else model.state_dict()

    def state_to_save(self, model: nn.Module, **kwargs: Any) -> dict[str, Any]:
        """What `save_model` is given, after hooks of users have seen it; `kwargs` are those of `save_state`."""
        return self.state_dict(model, **kwargs)

    def save_model(self, model: nn.Module, index: int, state: dict[str, Any], folder: Path, safe_serialization: bool) -> None:
        """Files of the model for `save_state`; `state` is its `state_to_save`, perhaps changed by the user's hooks."""
        if self.accelerator._writes_files:
            save_weights_file(state, index, folder, safe_serialization)

    def load_model(self, model: nn.Module, index: int, folder: Path, **kwargs: Any) -> None:
        """Fills the model from the files of `save_model`; `kwargs` as in `Module.load_state_dict`."""
        load_weights_file(self.unwrap(model, keep_torch_compile=False), index, folder, **kwargs)

    def save_optimizer(self, optimizer: torch.optim.Optimizer, index: int, folder: Path) -> None:
        """Files of the optimizer for `save_state`."""
        if self.accelerator._writes_files:
            save_optimizer_file(optimizer, index, folder)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, index: int, folder: Path, map_location: Any) -> None:
        """Fills the optimizer from the files of `save_optimizer`, which are read to `map_location`."""
        load_optimizer_file(optimizer, index, folder, map_location)

    def save_weights(self, model: nn.Module, folder: Path, max_shard_size: int | str, safe_serialization: bool) -> None:
        """The model's weights for other programs: `bigmodel.save_model`, in processes that write."""
        if self.accelerator._writes_files:
            save_streaming(self.unwrap(model, keep_torch_compile=False), folder, max_shard_size, safe_serialization)

    def release(self) -> None:
        """Lets go of what was made for prepared objects (`Accelerator.free_memory`)."""


def strategy_for(accelerator: Accelerator) -> Strategy:
    """The strategy of the accelerator's `distributed_type`."""
    place = STRATEGIES.get(accelerator.distributed_type)
    if place is None:
        return Strategy(accelerator)
    module, name = place
    try:
        strategy = getattr(importlib.import_module(f".{module}", __package__), name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(str(__package__)):
            raise
        raise TrainingError(f"This version of bigmodel does not train with {accelerator.distributed_type.value}.") from error
    return strategy(accelerator)
