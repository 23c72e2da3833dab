"""`Accelerator`: the training loop stays as it is, and runs on one device or many."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..errors import TrainingError
from .accelerator_processes import ProcessMethods
from .accelerator_properties import SettingsProperties
from .accelerator_saving import SavingMethods
from .accelerator_settings import (
    Handlers,
    accumulation_plugin,
    checked_precision,
    compile_plugin,
    loader_configuration,
    spreading_plugins,
)
from .accelerator_state import AcceleratorState
from .accelerator_tracking import TrackingMethods
from .accumulating import Accumulation
from .argument_types import refuse_wrong_arguments, wrong_thing
from .configuration import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration, TorchDynamoPlugin
from .data import prepare_data_loader, skip_first_batches
from .enums import DynamoBackend, PrecisionType, RNGType
from .float8 import refuse_without_float8
from .gradient_state import GradientState
from .handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from .lomo import lomo_backward
from .loss_scale import LossScale
from .memory import release_memory
from .metrics import gather_for_metrics
from .mixed_precision import get_grad_scaler, get_mixed_precision_context_manager
from .optimizer import AcceleratedOptimizer
from .parallelism import ParallelismConfig
from .preparing import even_batches_set, placements_of, prepared_optimizer, prepared_scheduler
from .random import known_rng_type
from .replicated import spreads_over_devices
from .scheduler import AcceleratedScheduler
from .strategy import Strategy, strategy_for
from .tracking.chosen import filter_trackers
from .tracking.tracker import Tracker

__all__ = ["Accelerator"]


class Accelerator(ProcessMethods, SavingMethods, SettingsProperties, TrackingMethods):
    """Makes a training loop run on whatever there is: one process or many, in half precision or not, with gradients of several batches.

    Args:
        device_placement: `prepare` moves models and batches to this process's device.
        split_batches: as in `DataLoaderConfiguration`, which may be given instead.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"`, or `"fp8"` (linear layers of torchao, the rest in bfloat16): what forwards compute in;
            outputs, weights and gradients stay in float32. None: the environment's `BIGMODEL_MIXED_PRECISION`, else `"no"`.
        gradient_accumulation_steps: batches whose gradients are added up before the optimizer steps, inside `accumulate`.
        cpu: compute on the CPU although there is an accelerator.
        dataloader_config: how data loaders are prepared.
        deepspeed_plugin, fsdp_plugin, megatron_lm_plugin: spread the model over processes instead of copying it; one of them.
            `deepspeed_plugin` may be several by name. `deepspeed_plugins` is the same argument.
        rng_types: random generators that are made equal in all processes when a loop over a loader begins: `"torch"`, an
            accelerator's, or `"generator"`, the loader's own (the default).
        log_with: experiment trackers by name, `"all"` that are installed, or trackers of your own; `init_trackers` starts them.
        project_dir, project_config: where checkpoints and logs go.
        gradient_accumulation_plugin: instead of `gradient_accumulation_steps`, with more choices.
        step_scheduler_with_optimizer: prepared schedulers step where the optimizer does, once for each process; False: at every call.
        kwargs_handlers: at most one each of `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs`,
            `InitProcessGroupKwargs`, `ProfileKwargs`.
        dynamo_backend, dynamo_plugin: compile models; a backend's name, or the plugin with all choices.
        parallelism_config: which processes have copies of the model, parts of it, and parts of sequences.

    Attributes:
        state: the `AcceleratorState`; `gradient_state`: the `GradientState`; both are shared in the process.
        scaler: the gradient scaler, with fp16.
        step: batches since gradients were last synchronized at a loader's end, as `accumulate` counts them.

    Raises:
        TrainingError: settings that exclude each other or that this machine cannot do.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: str | Tracker | Sequence[str | Tracker] | None = None,
        project_dir: str | PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
    ):
        refuse_wrong_arguments(Accelerator.__init__, "Accelerator", locals())
        settled = "_mixed_precision" in AcceleratorState._shared_state
        handlers = Handlers(kwargs_handlers)
        self.ddp_handler: DistributedDataParallelKwargs | None = handlers.get(DistributedDataParallelKwargs)
        self.scaler_handler: GradScalerKwargs | None = handlers.get(GradScalerKwargs)
        self.init_handler: InitProcessGroupKwargs | None = handlers.get(InitProcessGroupKwargs)
        self.autocast_handler: AutocastKwargs | None = handlers.get(AutocastKwargs)
        self.profile_handler: ProfileKwargs | None = handlers.get(ProfileKwargs)
        if deepspeed_plugin is not None and deepspeed_plugins is not None:
            raise TrainingError("deepspeed_plugin and deepspeed_plugins are both given; they are one argument.")
        plugins = spreading_plugins(
            settled,
            deepspeed_plugin=deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        accumulation = accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.dataloader_config = loader_configuration(dataloader_config, split_batches)
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.state = AcceleratorState(
            checked_precision(mixed_precision),
            cpu,
            dynamo_plugin=compile_plugin(dynamo_backend, dynamo_plugin, settled),
            parallelism_config=parallelism_config,
            **plugins,
            **({} if self.init_handler is None else self.init_handler.to_kwargs()),
        )
        if self.mixed_precision == PrecisionType.FP8:
            try:
                refuse_without_float8(self)
            except TrainingError:
                if not settled:  # the next Accelerator in a notebook may be another
                    AcceleratorState._reset_state()
                raise
        self.gradient_state = GradientState(accumulation)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = [str(known_rng_type(kind)) for kind in (["generator"] if rng_types is None else rng_types)]
        self.step = 0
        self._trigger = None
        self.log_with = filter_trackers(log_with, self.logging_dir)
        self.trackers = []
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._prepared_models: dict[int, nn.Module] = {}
        self._save_model_state_pre_hook = OrderedDict()
        self._load_model_state_pre_hook = OrderedDict()
        self.strategy: Strategy = strategy_for(self)
        self.loss_scale: LossScale | None = None
        if self.mixed_precision == PrecisionType.FP16 and self.strategy.scales_losses:
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.loss_scale = LossScale(get_grad_scaler(self.distributed_type, **options))

    # Preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Models, optimizers, data loaders and schedulers made ready for the loop, in any order and number; other objects as they are.

        What is prepared already, here or in an earlier call, is the same object again.

        Args:
            device_placement: for each argument whether it moves to this process's device; None: as the accelerator does.

        Returns as many objects as there are arguments, in their order; one alone is not in a tuple.
        """
        ready = self.strategy.prepare(args, placements_of(args, device_placement))
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """A model on its device, in its precision, with gradients over all processes (not with `evaluation_mode`), and compiled."""
        known = self._prepared_models.get(id(model))
        if known is None:
            if not isinstance(model, nn.Module):
                raise wrong_thing("prepare_model", "a model (nn.Module)", model)
            known = self.strategy.prepare_model(
                model, self.device_placement if device_placement is None else device_placement, evaluation_mode
            )
            self._models.append(known)
            self._prepared_models[id(model)] = self._prepared_models[id(known)] = known
        return known

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """An optimizer that steps where gradients are complete, and unscales them."""
        return prepared_optimizer(self, optimizer, self.device_placement if device_placement is None else device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A scheduler that steps where its optimizer does."""
        return prepared_scheduler(self, scheduler)

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """A loader that gives this process its share of the batches, on its device, and tells where a loop over it ends."""
        if any(each is data_loader for each in self._dataloaders):
            return data_loader
        if not hasattr(data_loader, "dataset"):
            raise wrong_thing("prepare_data_loader", "a DataLoader", data_loader)
        ready = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
            torch_device_mesh=self.strategy.data_mesh,
        )
        self._dataloaders.append(ready)
        return ready

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader over the same batches without the first `num_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """The model that was given to `prepare`.

        Args:
            keep_fp32_wrapper: its forward stays in the accelerator's precision; False puts its own back.
            keep_torch_compile: it stays compiled.
        """
        return self.strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a part of the model is dispatched to several devices, so that processes cannot train copies of it."""
        return spreads_over_devices(model)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forgets everything that was prepared, and gives its memory back. Returns None for each object, to be put in its place."""
        for prepared in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            prepared.clear()
        self._prepared_models.clear()
        self.strategy.release()
        self.step = 0
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    # The loop

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """One batch: forward, backward, `optimizer.step()`, `scheduler.step()` and `optimizer.zero_grad()` go inside.

        Every `gradient_accumulation_steps` batches, and at the last batch of a loader, gradients are synchronized and the optimizer steps;
        between, steps do nothing and gradients of `models` stay in this process. Losses are divided by the number of steps in `backward`,
        so a group that the end of the loader cuts short counts less.
        """
        return Accumulation(self, models)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Gradients of backwards inside stay in this process, to be added up; without several processes it does nothing."""
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Backwards inside synchronize gradients, although their forwards were inside `no_sync`."""
        return self.strategy.sync_in_backward(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, with the loss divided by the batches that are accumulated, and scaled where the precision needs it.

        With `learning_rate=` it is `lomo_backward`. With `scale_wrt_gas=False`, a word of DeepSpeed's, the loss is one that the script has
        divided.
        """
        if not isinstance(loss, torch.Tensor):
            raise wrong_thing("backward", "a loss that is a tensor", loss, "give its `loss`" if hasattr(loss, "loss") else "")
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, **kwargs)
            return
        strategy, state = self.strategy, self.gradient_state
        if strategy.divides_losses and kwargs.pop("scale_wrt_gas", True):
            steps = state.num_steps
            if steps > 1:
                loss = loss / steps
        state.gradients_wait = True
        strategy.backward(loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, with the prepared `Lomo` or `AdaLomo` of lomo-optim; see `lomo.lomo_backward`."""
        lomo_backward(self, loss, learning_rate)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """The precision of prepared models, for what is computed outside of them, such as a loss."""
        return get_mixed_precision_context_manager(self.native_amp, autocast_handler or self.autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Gradients in their true size, of one prepared optimizer, several, or all; for scripts that look at them before the step."""
        if self.loss_scale is not None:
            chosen = self._optimizers if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
            self.loss_scale.unscale(chosen, None, self.sync_gradients)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Scales gradients down to a common norm of at most `max_norm`. Returns the norm before.

        Where gradients are accumulated, call it if `sync_gradients`.
        """
        parameters = self._unscaled(parameters, "clip_grad_norm_")
        return self.strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Cuts every gradient to `[-clip_value, clip_value]`. Where gradients are accumulated, call it if `sync_gradients`."""
        self.strategy.clip_grad_value_(self._unscaled(parameters, "clip_grad_value_"), clip_value)

    def _unscaled(self, parameters: Any, function: str) -> list[torch.Tensor]:
        if isinstance(parameters, nn.Module) or not isinstance(parameters, Iterable):
            advice = "give `model.parameters()`" if isinstance(parameters, nn.Module) else ""
            raise wrong_thing(function, "parameters", parameters, advice)
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._optimizers, parameters, self.sync_gradients)
        return parameters

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all processes have of one batch, in the order of the data, every sample once; see `metrics.gather_for_metrics`.

        Args:
            use_gather_object: lists are lists of samples also where they hold tensors, which may then have any shapes.
        """
        return gather_for_metrics(self, input_data, use_gather_object)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """A training loop in which processes may have different numbers of batches: who has run out answers the others' collectives.

        Args:
            joinables: the prepared models that are trained in it.
            even_batches: for the loop, in place of what loaders were prepared with.
        """
        if not self.use_distributed:
            yield
            return
        with even_batches_set(self._dataloaders, even_batches), self.strategy.join(joinables):
            yield

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """A `torch.profiler.profile` around the body, made as the handler says (None: the accelerator's own)."""
        with (profile_handler or self.profile_handler or ProfileKwargs()).build() as profiler:
            yield profiler
