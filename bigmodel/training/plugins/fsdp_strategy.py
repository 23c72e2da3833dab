"""Training with `fully_shard`: what `Accelerator` leaves to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...dispatch import dispatched
from ...errors import TrainingError
from ...loading.sharded import is_sharded
from ..compiling import compile_in_place
from ..replicated import compute_in_precision
from ..sharded_values import held_as, whole
from ..strategy import Strategy
from ..training_files import COMPILED
from .fsdp_files import (
    load_optimizer_parts,
    load_parts,
    parts_folder,
    save_optimizer_parts,
    save_optimizer_whole,
    save_parts,
    save_whole_weights,
)
from .fsdp_model import average_in_backward, mesh_for, shard_model

if TYPE_CHECKING:
    from ..accelerator import Accelerator

__all__ = ["FullyShardedStrategy"]


class FullyShardedStrategy(Strategy):
    """Every process has a part of each parameter, of its gradient, and of its optimizer state.

    One process without a launcher forms a group of its own, so that the same script runs. `unwrap` gives the user's own model, which stays
    sharded: it may be too big for one process. Its values are in `state_dict` and in the files of `save_weights`.
    """

    keeps_gradients = False

    def __init__(self, accelerator: Accelerator):
        super().__init__(accelerator)
        self.plugin = accelerator.state.fsdp_plugin
        if not dist.is_initialized():
            backend = dist.get_default_backend_for_device(accelerator.device)
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        self._mesh: Any = None
        self._renewed = WeakIdKeyDictionary()
        self._averages = True

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        """Whether every process writes a part of the model."""
        return self.plugin.state_dict_type.name == "SHARDED_STATE_DICT"

    def prepare_model(self, model: nn.Module, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """The model itself, sharded in place; the parameters of optimizers that are prepared are its new ones."""
        from torch.distributed.fsdp import FSDPModule

        if dispatched(model) is not None or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise TrainingError(f"{type(model).__name__} is dispatched to several devices, and cannot be sharded over processes as well.")
        if isinstance(model, FSDPModule):  # the user's own doing
            return model
        compute_in_precision(self.accelerator, model)
        if self._mesh is None:
            self._mesh = mesh_for(self.plugin, self.accelerator.parallelism_config)
        for old, new in shard_model(model, self.plugin, self._mesh):
            self._renewed[old] = new
        for parameter in model.parameters():
            if not is_sharded(parameter) and parameter.requires_grad:
                average_in_backward(parameter, lambda: self._averages)
        for optimizer in self.accelerator._optimizers:
            self.adopt_parameters(optimizer.optimizer)
        self._compile(model)
        return model

    def _compile(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        # In place, so that names stay, and gathering happens outside of the graphs.
        units = (module for module in model.modules() if isinstance(module, FSDPModule) and module is not model)
        compile_in_place(model, self.accelerator.state.dynamo_plugin, units)

    def adopt_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts new parameters in the place of those that were sharded, and their parts of states in the place of whole ones."""
        for group in optimizer.param_groups:
            group["params"] = [self._renewed.get(parameter, parameter) for parameter in group["params"]]
        for old in [parameter for parameter in optimizer.state if parameter in self._renewed]:
            new = self._renewed[old]
            optimizer.state[new] = {name: held_as(new, value) for name, value in optimizer.state.pop(old).items()}

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards of the model inside keep whole gradients in this process."""
        with self._synchronizing(model, False):
            yield

    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Backwards inside average gradients, those kept before as well."""
        with self._synchronizing(model, True):
            yield

    @contextlib.contextmanager
    def _synchronizing(self, model: Any, averages: bool) -> Iterator[None]:
        before, self._averages = self._averages, averages
        model.set_requires_gradient_sync(averages)
        try:
            yield
        finally:
            self._averages = before
            model.set_requires_gradient_sync(before)

    def join(self, models: Sequence[nn.Module]) -> NoReturn:
        """Raises `TrainingError`: who has run out of batches has no forward in which to give its parts to the others."""
        raise TrainingError(
            "join_uneven_inputs: sharded models need every process in every forward. Leave even_batches on: all have as many batches then."
        )

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scales gradients down to a common norm of at most `max_norm`. Returns the norm before, of the whole model."""
        gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm_type = float(norm_type)
        local = [gradient.to_local() if is_sharded(gradient) else gradient for gradient in gradients]
        # Of what is smaller than the number of processes some have nothing, which has no largest number.
        parts = [part for part, gradient in zip(local, gradients, strict=True) if is_sharded(gradient) and part.numel()]
        others = [part for part, gradient in zip(local, gradients, strict=True) if not is_sharded(gradient)]
        device = self.accelerator.device
        total = torch.nn.utils.get_total_norm(parts, norm_type).to(device)
        group = self._mesh.get_group("parts") if self._mesh is not None else None
        if norm_type == float("inf"):
            dist.all_reduce(total, dist.ReduceOp.MAX, group)
        else:
            total = total**norm_type
            dist.all_reduce(total, dist.ReduceOp.SUM, group)
            total = total ** (1 / norm_type)
        if others:
            total = torch.nn.utils.get_total_norm([total, *others], norm_type).to(device)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for part in local:
            part.mul_(scale.to(part.device))
        return total

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cuts every gradient to `[-clip_value, clip_value]`."""
        for parameter in parameters:
            gradient: Any = parameter.grad
            if gradient is not None:
                (gradient.to_local() if is_sharded(gradient) else gradient).clamp_(-clip_value, clip_value)

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All values of the model: in the main process, or in all where the plugin's config says so."""
        config = self.plugin.state_dict_config
        everywhere = not getattr(config, "rank0_only", True)
        kept: dict[int, Any] = {}  # ties stay ties
        state: dict[str, Any] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if id(value) not in kept:
                full = whole(value) if isinstance(value, torch.Tensor) else value
                if not (everywhere or self.accelerator.is_main_process):
                    full = None
                elif isinstance(full, torch.Tensor) and config.offload_to_cpu:
                    full = full.to("cpu")
                kept[id(value)] = full
            state[name.replace(COMPILED, "")] = kept[id(value)]
        return state if everywhere or self.accelerator.is_main_process else {}

    def state_to_save(self, model: nn.Module, **kwargs: Any) -> dict[str, Any]:
        """The model's parts with a sharded state dict type, else all of it."""
        return dict(model.state_dict()) if self.is_sharded else self.state_dict(model, **kwargs)

    def save_model(self, model: nn.Module, index: int, state: dict[str, Any], folder: Path, safe_serialization: bool) -> None:
        """A file of all values, or a folder to which every process writes its part."""
        if self.is_sharded:
            save_parts(state, index, folder)
        else:
            super().save_model(model, index, state, folder, safe_serialization)

    def load_model(self, model: nn.Module, index: int, folder: Path, **kwargs: Any) -> None:
        """Fills the model from either, whatever saved it."""
        if parts_folder("model", index, folder).exists():
            load_parts(model, index, folder, **kwargs)
        else:
            super().load_model(model, index, folder, **kwargs)

    def save_optimizer(self, optimizer: torch.optim.Optimizer, index: int, folder: Path) -> None:
        """A file of all states, or a folder to which every process writes its part."""
        if self.is_sharded:
            save_optimizer_parts(self.accelerator._models, optimizer, index, folder)
        else:
            save_optimizer_whole(optimizer, index, folder, self.accelerator._writes_files)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, index: int, folder: Path, map_location: Any) -> None:
        """Fills the optimizer from either, whatever saved it."""
        if parts_folder("optimizer", index, folder).exists():
            load_optimizer_parts(self.accelerator._models, optimizer, index, folder)
        else:
            super().load_optimizer(optimizer, index, folder, map_location)

    def save_weights(self, model: nn.Module, folder: Path, max_shard_size: int | str, safe_serialization: bool) -> None:
        """Whole weights, one tensor in memory at a time."""
        state = model.state_dict(keep_vars=True)
        writes = self.accelerator._writes_files
        save_whole_weights(state, lambda name: whole(state[name]), folder, max_shard_size, safe_serialization, writes)

    def release(self) -> None:
        """Forgets which parameters were replaced."""
        self._renewed.clear()
