"""Optimizers that step while gradients are computed, parameter by parameter, so that no gradient is kept: LOMO's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import TrainingError

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["lomo_backward", "steps_in_backward"]


def steps_in_backward(optimizer: Any) -> bool:
    """Whether the optimizer has LOMO's `fused_backward(loss, learning_rate)`, in which it steps."""
    return hasattr(optimizer, "fused_backward")


def lomo_backward(accelerator: Accelerator, loss: torch.Tensor, learning_rate: float) -> None:
    """Backward and step in one, with the one prepared optimizer that does so.

    Raises `TrainingError` without one or with several, and where gradients would have to be kept: to be accumulated, unscaled or averaged.
    """
    found: list[Any] = [optimizer.optimizer for optimizer in accelerator._optimizers if steps_in_backward(optimizer.optimizer)]
    if len(found) != 1:
        raise TrainingError(
            f"lomo_backward: {len(found)} of the prepared optimizers step in their backward, and one has to. Prepare a Lomo or AdaLomo of "
            "lomo_optim (pip install lomo-optim)."
        )
    steps = accelerator.gradient_accumulation_steps
    if steps > 1:
        raise TrainingError(
            f"lomo_backward steps at every batch and keeps no gradients, which gradient_accumulation_steps={steps} would add up: "
            "leave that at 1."
        )
    if accelerator.loss_scale is not None:
        raise TrainingError("lomo_backward keeps no gradients that could be unscaled for mixed_precision='fp16': use 'bf16'.")
    if accelerator.use_distributed:
        raise TrainingError(
            f"lomo_backward steps before gradients of {accelerator.num_processes} processes are averaged, so that their models would "
            "differ: use one process."
        )
    found[0].fused_backward(loss, learning_rate)
