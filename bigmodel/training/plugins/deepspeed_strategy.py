"""Training with DeepSpeed: what `Accelerator` leaves to its engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ...constants import MODEL_NAME
from ...errors import CheckpointNotFoundError, TrainingError
from ...modules import find_blocks
from ..compiling import compile_in_place
from ..enums import DynamoBackend
from ..strategy import Strategy
from ..training_files import COMPILED, file_name
from .deepspeed_engine import check_parts, deepspeed_module, make_engine, start_group
from .deepspeed_stand_ins import DummyOptim, DummyScheduler
from .deepspeed_values import agree_on_accumulation, batch_size_of, prepared_values
from .deepspeed_wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

if TYPE_CHECKING:
    from ..accelerator import Accelerator

__all__ = ["DeepSpeedStrategy"]


class DeepSpeedStrategy(Strategy):
    """A model and its optimizer are one engine, made by the selected plugin.

    One accelerator trains one model; other models, without an optimizer, are for forwards.
    """

    scales_losses = False
    keeps_gradients = False

    def __init__(self, accelerator: Accelerator):
        super().__init__(accelerator)
        self._trained: DeepSpeedEngineWrapper | None = None
        self._engines: list[Any] = []
        self._synchronizes: bool | None = None
        agree_on_accumulation(accelerator, accelerator.deepspeed_plugin)
        # Before an engine is made, transformers may build models sharded.
        deepspeed_module()
        start_group()

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        """Whether every process holds a part of the model."""
        return bool(self.accelerator.deepspeed_plugin.hf_ds_config.is_zero3())

    # Preparing

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
        """Models, optimizers, loaders and schedulers of one call; at most one model that is trained, with its optimizer."""
        accelerator, plugin = self.accelerator, self.accelerator.deepspeed_plugin
        agree_on_accumulation(accelerator, plugin)
        ready = list(objects)
        sizes = []
        for position, (thing, placement) in enumerate(zip(objects, placements, strict=True)):
            if isinstance(thing, DataLoader):
                sizes.append(self._batch_size(thing))
                ready[position] = accelerator.prepare_data_loader(thing, device_placement=placement)
        models = self._positions(objects, nn.Module, accelerator._models)
        optimizers = self._positions(objects, (torch.optim.Optimizer, DummyOptim), accelerator._optimizers)
        schedulers = self._positions(objects, (LRScheduler, DummyScheduler), accelerator._schedulers)
        if not optimizers:
            for position in models:
                ready[position] = self._for_forwards(objects[position], placements[position], sizes)
        elif len(models) != 1 or len(optimizers) != 1 or len(schedulers) > 1:
            raise TrainingError(
                f"DeepSpeed joins one model with its optimizer: prepare both in one call, not {len(models)} models, {len(optimizers)} "
                f"optimizers and {len(schedulers)} schedulers. Models that are not trained go into a call of their own."
            )
        else:
            scheduler = objects[schedulers[0]] if schedulers else None
            engine, optimizer, made = self._trained_by(objects[models[0]], objects[optimizers[0]], scheduler, sizes)
            ready[models[0]], ready[optimizers[0]] = engine, optimizer
            if made is not None:
                ready[schedulers[0]] = made
        for position in schedulers:
            if isinstance(ready[position], LRScheduler):
                ready[position] = accelerator.prepare_scheduler(ready[position])
            elif isinstance(ready[position], DummyScheduler):
                raise TrainingError("A DummyScheduler is prepared in one call with the model and its optimizer.")
        return ready

    def _batch_size(self, loader: Any) -> int | None:
        accelerator = self.accelerator
        if any(each is loader for each in accelerator._dataloaders):
            total = loader.total_batch_size
            return None if total is None else total // accelerator.num_processes
        size = batch_size_of(loader)
        return size // accelerator.num_processes if size is not None and accelerator.split_batches else size

    @staticmethod
    def _positions(objects: Sequence[Any], kinds: Any, prepared: Sequence[Any]) -> list[int]:
        return [
            position for position, thing in enumerate(objects) if isinstance(thing, kinds) and not any(each is thing for each in prepared)
        ]

    def _trained_by(self, model: nn.Module, optimizer: Any, scheduler: Any, sizes: Sequence[int | None]) -> tuple[Any, Any, Any]:
        accelerator, plugin = self.accelerator, self.accelerator.deepspeed_plugin
        if self._trained is not None:
            raise TrainingError(
                "This Accelerator trains a model with DeepSpeed already: make another Accelerator for the next one, after "
                "accelerator.state.select_deepspeed_plugin(name) if it has a plugin of its own."
            )
        check_parts(plugin, model, optimizer, scheduler)
        values = prepared_values(accelerator, plugin, model, optimizer, scheduler, self._known_sizes(sizes))
        engine = self._engine(model, values, optimizer, scheduler)
        self._trained = DeepSpeedEngineWrapper(engine)
        ready = DeepSpeedOptimizerWrapper(self._trained)
        accelerator._optimizers.append(ready)
        made = None
        if isinstance(scheduler, DummyScheduler):
            made = DeepSpeedSchedulerWrapper(engine.lr_scheduler, [ready])
            accelerator._schedulers.append(made)
        return engine, ready, made

    def _known_sizes(self, sizes: Sequence[int | None]) -> list[int]:
        known = [size for size in sizes if size is not None]
        earlier = [self._batch_size(loader) for loader in self.accelerator._dataloaders]
        return known or [size for size in earlier if size is not None]

    def _for_forwards(self, model: nn.Module, placement: bool | None, sizes: Sequence[int | None]) -> nn.Module:
        accelerator, plugin = self.accelerator, self.accelerator.deepspeed_plugin
        if not plugin.hf_ds_config.is_zero3():
            return accelerator.prepare_model(model, device_placement=placement, evaluation_mode=True)
        check_parts(plugin, model, None, None)
        values = prepared_values(accelerator, plugin, model, None, None, self._known_sizes(sizes) or [1])
        return self._engine(model, values, None, None)

    def _engine(self, model: nn.Module, values: dict[str, Any], optimizer: Any, scheduler: Any) -> Any:
        accelerator = self.accelerator
        compiler = accelerator.state.dynamo_plugin
        if compiler is not None and compiler.backend != DynamoBackend.NO and accelerator.deepspeed_plugin.hf_ds_config.is_zero3():
            raise TrainingError(
                f"ZeRO stage 3 brings each module's parameters when its forward begins, which backend {str(compiler.backend)!r} would not "
                "see: train without dynamo_plugin and dynamo_backend, or with ZeRO stage 2."
            )
        compile_in_place(model, compiler, map(model.get_submodule, find_blocks(model)))
        engine = make_engine(accelerator.deepspeed_plugin, values, model, optimizer, scheduler)
        self._engines.append(engine)
        accelerator._models.append(engine)
        accelerator._prepared_models[id(model)] = accelerator._prepared_models[id(engine)] = engine
        # Models are built by now; what generates with them, or saves them, has to know that they are sharded.
        accelerator.deepspeed_plugin._announce()
        return engine

    def prepare_model(self, model: nn.Module, device_placement: bool, evaluation_mode: bool) -> nn.Module:
        """A copy for forwards. Raises `TrainingError` without `evaluation_mode`."""
        if not evaluation_mode:
            raise TrainingError(
                "DeepSpeed joins a model with its optimizer: call accelerator.prepare(model, optimizer, …), or for forwards alone "
                "accelerator.prepare(model)."
            )
        return super().prepare_model(model, device_placement, evaluation_mode)

    def adopt_parameters(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        """Raises `TrainingError`: an optimizer alone would train nothing of the engine's."""
        raise TrainingError("DeepSpeed joins an optimizer with its model: call accelerator.prepare(model, optimizer, …).")

    # The loop

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of `loss`, averaged where the accelerator synchronizes them; `kwargs` as in DeepSpeed's `engine.backward`."""
        if self._trained is None:
            raise TrainingError("Nothing is trained: no model was prepared together with its optimizer.")
        synchronizes = self.accelerator.sync_gradients if self._synchronizes is None else self._synchronizes
        self._trained.backward(loss, sync_gradients=synchronizes, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards inside end no step."""
        with self._synchronizing(False):
            yield

    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Backwards inside average what was added up."""
        with self._synchronizing(True):
            yield

    @contextlib.contextmanager
    def _synchronizing(self, synchronizes: bool) -> Iterator[None]:
        before, self._synchronizes = self._synchronizes, synchronizes
        try:
            yield
        finally:
            self._synchronizes = before

    def join(self, models: Sequence[nn.Module]) -> NoReturn:
        """Raises `TrainingError`: engines of other processes would wait for one that has run out of batches."""
        raise TrainingError(
            "join_uneven_inputs: DeepSpeed needs every process in every step. Leave `even_batches` on, so that all have as many batches."
        )

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """The step clips the norm of all gradients together. Returns the norm before; None where no step is due.

        Raises `TrainingError` for other norms than the Euclidean, and where the config says another limit.
        """
        if self._trained is None or self._keeps_gradients():
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise TrainingError(f"norm_type={norm_type}: DeepSpeed clips by the Euclidean norm, 2.")
        self._trained.clip_next_step(float(max_norm))
        return self._trained.get_global_grad_norm() if self._trained.waits_for_step else None

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Raises `TrainingError` with ZeRO: gradients are in pieces by then."""
        if self._trained is not None and not self._keeps_gradients():
            raise TrainingError("clip_grad_value_: DeepSpeed's ZeRO has taken the gradients to pieces by then; use clip_grad_norm_.")
        super().clip_grad_value_(parameters, clip_value)

    def _keeps_gradients(self) -> bool:
        """Whether parameters have their averaged gradients between backward and step: stage 0 in float32, whose optimizer is torch's."""
        return self._trained is not None and isinstance(self._trained.engine.optimizer, torch.optim.Optimizer)

    # Files

    def _is_engine(self, model: Any) -> bool:
        return any(each is model for each in self._engines)

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All values of the model, in the precision that it computes in; with stage 3, on the host of the main process alone.

        Raises `TrainingError` with stage 3, unless the plugin says that gathering is wanted (`zero3_save_16bit_model`).
        """
        if not (self._is_engine(model) and self.is_sharded):
            return super().state_dict(model, unwrap)
        self._refuse_unwanted_gathering()
        gathered = deepspeed_module().zero.GatheredParameters
        module = self.unwrap(model, keep_torch_compile=False)
        kept: dict[int, torch.Tensor] = {}  # ties stay ties
        state: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in kept:
                with gathered([value]) if isinstance(value, nn.Parameter) else contextlib.nullcontext():
                    kept[id(value)] = value.detach().to("cpu", copy=True) if self.accelerator.is_main_process else value
            state[name.replace(COMPILED, "")] = kept[id(value)]
        return state if self.accelerator.is_main_process else {}

    def _refuse_unwanted_gathering(self) -> None:
        if not self.accelerator.deepspeed_plugin.get_value("zero_optimization.stage3_gather_16bit_weights_on_model_save"):
            raise TrainingError(
                "With ZeRO stage 3 no process has the whole model. To gather it, set DeepSpeedPlugin(zero3_save_16bit_model=True), or "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save in the DeepSpeed config; save_state needs no gathering."
            )

    def state_to_save(self, model: nn.Module, **kwargs: Any) -> dict[str, Any]:
        """Nothing of an engine, which writes its own files."""
        return {} if self._is_engine(model) else super().state_to_save(model, **kwargs)

    def save_model(self, model: Any, index: int, state: dict[str, Any], folder: Path, safe_serialization: bool) -> None:
        """DeepSpeed's own checkpoint, a folder `pytorch_model` (`pytorch_model_1`, …) to which every process writes its part."""
        if self._is_engine(model):
            model.save_checkpoint(str(folder), tag=file_name(MODEL_NAME, index, ""))
        else:
            super().save_model(model, index, state, folder, safe_serialization)

    def load_model(self, model: Any, index: int, folder: Path, **kwargs: Any) -> None:
        """Fills engine, optimizer and DeepSpeed's own scheduler from that folder; `kwargs` may have `strict`."""
        if not self._is_engine(model):
            super().load_model(model, index, folder, **kwargs)
            return
        tag = file_name(MODEL_NAME, index, "")
        if not (folder / tag).is_dir():
            raise CheckpointNotFoundError(
                f"{folder}: there is no folder {tag} of DeepSpeed for model {index}. Prepare models in the same order."
            )
        path, _ = model.load_checkpoint(str(folder), tag=tag, load_module_strict=kwargs.get("strict", True))
        if path is None:
            raise TrainingError(f"{folder / tag} is not a checkpoint that DeepSpeed can go on from; its log says why.")

    def save_optimizer(self, optimizer: torch.optim.Optimizer, index: int, folder: Path) -> None:
        """Nothing: it is in the engine's checkpoint."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, index: int, folder: Path, map_location: Any) -> None:
        """Nothing: it comes with the engine's checkpoint."""

    def save_weights(self, model: nn.Module, folder: Path, max_shard_size: int | str, safe_serialization: bool) -> None:
        """The model's weights for other programs; with stage 3 every process has the whole model on its device meanwhile."""
        if not (self._is_engine(model) and self.is_sharded):
            super().save_weights(model, folder, max_shard_size, safe_serialization)
            return
        self._refuse_unwanted_gathering()
        with deepspeed_module().zero.GatheredParameters(list(model.parameters())):
            super().save_weights(model, folder, max_shard_size, safe_serialization)

    def release(self) -> None:
        """Ends the engines."""
        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        self._trained = None
