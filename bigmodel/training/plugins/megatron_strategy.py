"""Training with Megatron-LM: tensor-parallel models of megatron-core, copied over the other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import TrainingError
from ..accelerator_state import AcceleratorState
from ..replicated import averaged, compute_in_precision, sync_in_backward
from ..strategy import Strategy
from .fsdp_files import save_whole_weights
from .megatron_build import build, check_own, renewed_parameters
from .megatron_core import require_megatron_core, start_model_parallel
from .megatron_files import (
    WholeTensors,
    load_parts_of_model,
    load_parts_of_optimizer,
    parts_of_model,
    save_parts_of_model,
    save_parts_of_optimizer,
)
from .megatron_layers import follow_autocast
from .megatron_model import MegatronModel
from .megatron_models import described, tied_names
from .megatron_names import Rule
from .megatron_parts import clip_norm
from .megatron_refusals import refuse_what_is_not_done
from .megatron_scheduler import MegatronLMDummyScheduler, megatron_schedule

if TYPE_CHECKING:
    from ..accelerator import Accelerator

__all__ = ["MegatronStrategy"]


class MegatronStrategy(Strategy):
    """Processes that stand next to each other, `tp_degree` of them, share each matrix of one model; there are as many copies as fit.

    The matrices, their collectives and the loss are megatron-core's. Averaging is torch's `DistributedDataParallel` over megatron-core's
    data-parallel groups, and optimizers are torch's: those of megatron-core compute on CUDA devices only.
    """

    is_sharded = True

    def __init__(self, accelerator: Accelerator):
        super().__init__(accelerator)
        self.plugin = accelerator.state.megatron_lm_plugin
        try:
            refuse_what_is_not_done(accelerator, self.plugin)
            require_megatron_core()
            if not dist.is_initialized():
                backend = dist.get_default_backend_for_device(accelerator.device)
                dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
            start_model_parallel(self.plugin)
            _agree_on_accumulation(accelerator, self.plugin)
        except Exception:
            AcceleratorState._reset_state()  # the next Accelerator in a notebook may be another
            raise
        from megatron.core import parallel_state
        from torch.distributed.device_mesh import DeviceMesh

        groups = [parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()]
        ranks = torch.arange(dist.get_world_size()).view(-1, self.plugin.tp_degree)
        self.data_mesh = DeviceMesh.from_group(groups, accelerator.device.type, mesh=ranks, mesh_dim_names=("dp", "tp"))
        self.data_ranks = ranks[:, 0].tolist()
        self._mesh = self.data_mesh["tp"]
        self._renewed = WeakIdKeyDictionary()
        self._sources: list[nn.Module] = []  # prepared models are known by their ids
        self._clipping: list[tuple[Any, Any]] = []
        self._is_clipped = False

    # Preparing

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """The objects of one `Accelerator.prepare`; a `MegatronLMDummyScheduler` becomes megatron-core's schedule."""
        from megatron.core.models.gpt.gpt_model import GPTModel

        accelerator = self.accelerator
        optimizers = [each.optimizer for each in accelerator._optimizers]
        optimizers += [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        for model in objects:
            if isinstance(model, nn.Module) and not isinstance(model, GPTModel):
                _check_groups(optimizers, model, described(model).rules)
        ready = super().prepare(objects, placements)
        for position, thing in enumerate(objects):
            if isinstance(thing, MegatronLMDummyScheduler):
                inside = getattr(thing.optimizer, "optimizer", thing.optimizer)
                optimizer = next((each for each in accelerator._optimizers if each.optimizer is inside), None)
                if optimizer is None:
                    raise TrainingError("MegatronLMDummyScheduler: prepare its optimizer first, or in the same call.")
                ready[position] = megatron_schedule(self.plugin, thing, optimizer)
                accelerator._schedulers.append(ready[position])
        return ready

    def prepare_model(self, model: nn.Module, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """This process's part of a `GPTModel` with the values of the transformers model, which has none any more, or of the user's own."""
        from megatron.core.models.gpt.gpt_model import GPTModel

        device = self.accelerator.device
        if isinstance(model, GPTModel):
            check_own(model, self.plugin, self._mesh)
            gpt, description = model, None
        else:
            description = described(model)
            gpt = build(self.plugin, description, model, self._mesh, device)
            self._sources.append(model)
            for old, new in renewed_parameters(description.rules, model, gpt):
                self._renewed[old] = new
        if device_placement:
            gpt.to(device)
        if self.accelerator.native_amp:
            follow_autocast(gpt)
            compute_in_precision(self.accelerator, gpt)
        module = gpt
        if self.data_processes > 1 and not evaluation_mode and any(parameter.requires_grad for parameter in gpt.parameters()):
            module = averaged(self.accelerator, gpt, self.data_mesh.get_group("dp"))
        if description is None:
            ready = MegatronModel(module, self.plugin, self._mesh)
        else:
            ready = MegatronModel(module, self.plugin, self._mesh, model.config, description.rules, tied_names(description.rules, model))
        for optimizer in self.accelerator._optimizers:
            self.adopt_parameters(optimizer.optimizer)
        return ready.train(model.training)

    def adopt_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts parameters of megatron-core in the place of those that were built into them; its steps clip, as the plugin says.

        Raises `TrainingError` where groups of the optimizer would share a parameter, and for one that has made steps already.
        """
        renewed = [[self._renewed.get(each, each) for each in group["params"]] for group in optimizer.param_groups]
        _check_owners((id(each), number) for number, parameters in enumerate(renewed) for each in parameters)
        for group, parameters in zip(optimizer.param_groups, renewed, strict=True):
            group["params"] = list({id(each): each for each in parameters}.values())
        if any(parameter in self._renewed for parameter in optimizer.state):
            raise TrainingError("The optimizer has made steps before its model was prepared: prepare both first, or load_state.")
        if not any(each is optimizer for each, _ in self._clipping):
            self._clipping.append((optimizer, optimizer.register_step_pre_hook(self._clip)))

    def _clip(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        limit, done = float(self.plugin.gradient_clipping), self._is_clipped
        self._is_clipped = False
        if limit and not done:
            clip_norm((parameter for group in optimizer.param_groups for parameter in group["params"]), limit, 2.0, self._mesh)

    # The loop

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of `loss`. Raises `TrainingError` outside of `accumulate` where the plugin has several batches to a step."""
        state, count = self.accelerator.gradient_state, int(self.plugin.num_micro_batches)
        if count > 1 and self.accelerator.step == 0 and not state.end_of_dataloader:
            raise TrainingError(
                f"num_micro_batches={count} makes {count} batches of the loader one step: put a batch's forward, backward and step inside "
                "`with accelerator.accumulate(model)`."
            )
        super().backward(loss, **kwargs)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Backwards of the model inside keep their gradients in this copy."""
        no_sync = getattr(model.module, "no_sync", None)
        return contextlib.nullcontext() if self.data_processes == 1 or no_sync is None else no_sync()

    def sync_in_backward(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Backwards inside average gradients although their forward was inside `no_sync`."""
        return sync_in_backward(model.module)

    def join(self, models: Sequence[nn.Module]) -> NoReturn:
        """Raises `TrainingError`: processes that share a model need each other in every forward."""
        raise TrainingError("join_uneven_inputs: Megatron-LM needs every process in every step. Leave even_batches on.")

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scales gradients down to a common norm, of the whole model, in place of what the next step would do (`gradient_clipping`)."""
        self._is_clipped = True
        wanted = {id(new): new for new in (self._renewed.get(parameter, parameter) for parameter in parameters)}
        return clip_norm(wanted.values(), float(max_norm), float(norm_type), self._mesh)

    # Files

    def unwrap(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """The `GPTModel`, this process's part."""
        return model.gpt if isinstance(model, MegatronModel) else model

    def state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """All values under the names of the user's model, on the host of the main process; others get nothing."""
        whole = WholeTensors(model, self._mesh)
        kept: dict[int, torch.Tensor] = {}  # ties stay ties
        for name, shape in whole.shapes.items():
            if id(shape) not in kept:
                values = whole[name]
                kept[id(shape)] = values.to("cpu", copy=True) if self.accelerator.is_main_process else values.new_empty(0)
        return {name: kept[id(shape)] for name, shape in whole.shapes.items()} if self.accelerator.is_main_process else {}

    def state_to_save(self, model: Any, **kwargs: Any) -> dict[str, Any]:
        """This process's parts, under the names of megatron-core."""
        return dict(parts_of_model(model, self._mesh))

    def save_model(self, model: nn.Module, index: int, state: dict[str, Any], folder: Path, safe_serialization: bool) -> None:
        """A folder to which every process writes its part."""
        save_parts_of_model(state, index, folder)

    def load_model(self, model: Any, index: int, folder: Path, **kwargs: Any) -> None:
        """Fills the model from that folder, whatever the degrees of the processes that wrote it."""
        load_parts_of_model(model, index, folder, self._mesh, bool(kwargs.get("strict", True)))

    def save_optimizer(self, optimizer: Any, index: int, folder: Path) -> None:
        """Likewise; nothing with `no_save_optim`."""
        if not self.plugin.no_save_optim:
            models: Any = self.accelerator._models
            save_parts_of_optimizer(models, optimizer.optimizer, index, folder, self._mesh, self.accelerator._writes_files)

    def load_optimizer(self, optimizer: Any, index: int, folder: Path, map_location: Any) -> None:
        """Likewise; nothing with `no_load_optim`."""
        if not self.plugin.no_load_optim:
            models: Any = self.accelerator._models
            load_parts_of_optimizer(models, optimizer.optimizer, index, folder, self._mesh)

    def save_weights(self, model: Any, folder: Path, max_shard_size: int | str, safe_serialization: bool) -> None:
        """Whole weights under the names of the user's model, one tensor in memory at a time."""
        whole = WholeTensors(model, self._mesh)
        writes = self.accelerator._writes_files
        save_whole_weights(whole.shapes, whole.__getitem__, folder, max_shard_size, safe_serialization, writes)

    def release(self) -> None:
        """Forgets which parameters were replaced, and leaves the steps of optimizers alone."""
        for _, hook in self._clipping:
            hook.remove()
        for kept in (self._renewed, self._sources, self._clipping):
            kept.clear()


def _check_groups(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, rules: Iterable[Rule]) -> None:
    """Before the model is emptied: what becomes one parameter must lie in one group."""
    state = model.state_dict(keep_vars=True)
    becomes = {id(state[source]): rule.name for rule in rules for source in rule.sources}
    for optimizer in optimizers:
        groups = enumerate(optimizer.param_groups)
        _check_owners((becomes.get(id(each), id(each)), number) for number, group in groups for each in group["params"])


def _check_owners(owned: Iterable[tuple[Hashable, int]]) -> None:
    """Parameters of megatron-core (by whatever tells one from the other) with the numbers of groups that hold them, or parts of them."""
    owners: dict[Hashable, int] = {}
    for parameter, number in owned:
        if owners.setdefault(parameter, number) != number:
            raise TrainingError(
                f"Groups {owners[parameter]} and {number} of the optimizer have tensors that are one parameter in megatron-core (queries,"
                " keys and values; the two of a gated layer): put them into one group."
            )


def _agree_on_accumulation(accelerator: Accelerator, plugin: Any) -> None:
    count, steps = int(plugin.num_micro_batches), accelerator.gradient_accumulation_steps
    if count == 1 or count == steps:
        return
    if steps != 1:
        raise TrainingError(f"num_micro_batches={count} in the plugin, and gradient_accumulation_steps={steps}: they are one; give one.")
    accelerator.gradient_accumulation_steps = count
