"""What the `"auto"` values of DeepSpeed's config come to, from what is prepared together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import TrainingError
from .deepspeed_config import AUTO
from .deepspeed_stand_ins import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from ..accelerator import Accelerator
    from .deepspeed import DeepSpeedPlugin

__all__ = ["agree_on_accumulation", "batch_size_of", "prepared_values"]


def agree_on_accumulation(accelerator: Accelerator, plugin: DeepSpeedPlugin) -> None:
    """The accelerator accumulates as many batches as the config says. Raises `TrainingError` where both say something else."""
    there, mine = plugin.get_value("gradient_accumulation_steps", AUTO), accelerator.gradient_accumulation_steps
    if there in (AUTO, mine):
        return
    if mine != 1:
        raise TrainingError(
            f"gradient_accumulation_steps is {there} in the DeepSpeed config and {mine} in the Accelerator: write 'auto' in the config, "
            "or one number in both."
        )
    accelerator.gradient_accumulation_steps = there


def batch_size_of(loader: Any) -> int | None:
    """Samples in a loader's batch; None where that is not known."""
    size = getattr(loader, "batch_size", None)
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if size is None else size


def prepared_values(
    accelerator: Accelerator, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any, batch_sizes: Iterable[int]
) -> dict[str, Any]:
    """Values by their dotted names, `batch_sizes` being those of one process. Numbers of samples are there whether `"auto"` or not.

    Raises `TrainingError` where nothing says how many samples a batch has.
    """
    sizes = list(batch_sizes)
    micro = plugin.get_value("train_micro_batch_size_per_gpu", AUTO)
    values: dict[str, Any] = {"gradient_accumulation_steps": accelerator.gradient_accumulation_steps}
    if sizes:
        values["train_micro_batch_size_per_gpu"] = micro = min(sizes) if plugin.is_train_batch_min else max(sizes)
    elif micro == AUTO:
        raise TrainingError(
            "DeepSpeed wants to know the samples in a batch: prepare a loader that has a batch size together with the model, or write "
            "train_micro_batch_size_per_gpu into the DeepSpeed config (accelerator.state.deepspeed_plugin.deepspeed_config)."
        )
    values["train_batch_size"] = micro * accelerator.gradient_accumulation_steps * accelerator.num_processes
    found = {
        "gradient_clipping": 0.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        **_of_optimizer(optimizer),
        **_of_scheduler(scheduler, optimizer, 1 if accelerator.split_batches else accelerator.num_processes),
        **_of_width(model),
    }
    return values | {name: value for name, value in found.items() if plugin.is_auto(name)}


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, DummyOptim):
        options: Mapping[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    else:
        options = getattr(optimizer, "defaults", {}) if isinstance(optimizer, torch.optim.Optimizer) else {}
    return {f"optimizer.params.{name}": value for name, value in options.items()}


def _of_scheduler(scheduler: Any, optimizer: Any, processes: int) -> dict[str, Any]:
    if not isinstance(scheduler, DummyScheduler):
        return {}
    options = {"warmup_min_lr": 0, "warmup_num_steps": max(math.ceil(scheduler.warmup_num_steps / processes), 1), **scheduler.kwargs}
    if scheduler.total_num_steps is not None:
        options["total_num_steps"] = math.ceil(scheduler.total_num_steps / processes)
    rate = _of_optimizer(optimizer).get("optimizer.params.lr")
    if rate is not None:
        options.setdefault("warmup_max_lr", rate)
    return {f"scheduler.params.{name}": value for name, value in options.items()}


def _of_width(model: nn.Module) -> dict[str, Any]:
    """Sizes of buffers that fit a transformers model, as its Trainer computes them."""
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        width = getattr(place, "hidden_size", None) or max(getattr(place, "hidden_sizes", None) or [0])
        if width:
            return {
                "zero_optimization.reduce_bucket_size": width * width,
                "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
                "zero_optimization.stage3_param_persistence_threshold": 10 * width,
            }
    return {}
