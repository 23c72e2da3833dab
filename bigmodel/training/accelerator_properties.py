"""The part of `Accelerator` that tells how it trains."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..errors import TrainingError
from .accelerator_state import AcceleratorState
from .configuration import DataLoaderConfiguration, checked_steps
from .enums import PrecisionType
from .gradient_state import GradientState
from .loss_scale import LossScale
from .optimizer import AcceleratedOptimizer
from .parallelism import ParallelismConfig

__all__ = ["SettingsProperties"]


class SettingsProperties:
    """Settings, of which some may be changed between steps."""

    state: AcceleratorState
    gradient_state: GradientState
    dataloader_config: DataLoaderConfiguration
    loss_scale: LossScale | None
    _optimizers: list[AcceleratedOptimizer]

    @property
    def mixed_precision(self) -> str:
        """What forwards compute in: `"no"`, `"fp16"`, `"bf16"`, `"fp8"`."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under torch's autocast."""
        return self.state.mixed_precision in (PrecisionType.FP16, PrecisionType.BF16, PrecisionType.FP8)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; None where the precision needs none."""
        return None if self.loss_scale is None else self.loss_scale.scaler

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin; None without."""
        return self.state.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self.state.is_fsdp2

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Which processes have copies of the model, parts of it, and parts of sequences."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The `DeviceMesh` of `parallelism_config`, with dimensions `dp_replicate`, `dp_shard`, `cp`, `tp`; None without."""
        return self.state.device_mesh

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> contextlib.AbstractContextManager[None]:
        """Nothing where processes do not share sequences; where they do, a `TrainingError`: the script takes its part of them itself."""
        if self.parallelism_config is not None and self.parallelism_config.cp_enabled:
            raise TrainingError(
                "maybe_context_parallel: Accelerator does not cut sequences, nor change attention. Cut them in the script, by "
                "accelerator.torch_device_mesh['cp'], for a model whose attention knows of it; or leave cp_size out."
            )
        return contextlib.nullcontext()

    @property
    def split_batches(self) -> bool:
        """As in `DataLoaderConfiguration`."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """As in `DataLoaderConfiguration`."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As in `DataLoaderConfiguration`; a change counts for loaders that are prepared later."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """As in `DataLoaderConfiguration`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As in `DataLoaderConfiguration`."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As in `DataLoaderConfiguration`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch's gradients are synchronized, and the optimizer steps."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches whose gradients are added up before a step; a change counts at once."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = checked_steps("gradient_accumulation_steps", gradient_accumulation_steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of some optimizer changed nothing, because scaled gradients were infinite or no numbers."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)
