"""DeepSpeed's engine, optimizer and scheduler in a loop that calls backward, step and zero_grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import TrainingError
from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler

__all__ = ["DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"]


class DeepSpeedEngineWrapper:
    """The engine's part of a step: gradients are averaged in the backward of the last batch, and the optimizer's `step` is the engine's.

    Args:
        engine: a `deepspeed.DeepSpeedEngine` with an optimizer.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.waits_for_step = False
        self._clipping = float(engine.gradient_clipping())

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Gradients of a loss that is divided by the accumulated batches already, added up; with `sync_gradients`, averaged.

        Raises `TrainingError` for a second one before the step: the gradients of the first are averaged and cut to pieces by then.
        """
        if self.waits_for_step:
            raise TrainingError(
                "DeepSpeed takes one backward to a step: add losses up before backward, call optimizer.step() after it, and accumulate "
                "batches inside `with accelerator.accumulate(model)`."
            )
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self.waits_for_step = sync_gradients
        if not sync_gradients:
            self.engine.step()  # counts the batch

    def step(self) -> None:
        """The optimizer's step, and that of a scheduler which DeepSpeed has made; nothing where no averaged gradients wait for it."""
        if self.waits_for_step:
            self.engine.step()
            self.waits_for_step = False
            self._set_clipping(self._clipping)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because scaled gradients were infinite or no numbers."""
        return not self.waits_for_step and not self.engine.was_step_applied()

    def clip_next_step(self, max_norm: float) -> None:
        """The next step clips gradients to this norm. Raises `TrainingError` where the config says another one."""
        if self._clipping not in (0.0, max_norm):
            raise TrainingError(
                f"clip_grad_norm_ is called with {max_norm}, but gradient_clipping is {self._clipping} in the DeepSpeed config: "
                "write 'auto' there, or one value in both."
            )
        self._set_clipping(max_norm)

    def _set_clipping(self, max_norm: float) -> None:
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = max_norm

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients together: of those that wait for their step, else of the last step's; None before the first."""
        norm = self._waiting_norm() if self.waits_for_step else self.engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    def _waiting_norm(self) -> Any:
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
            return optimizer.scaled_global_norm() / optimizer.loss_scale
        if hasattr(optimizer, "_get_norm_groups"):  # stage 3
            norms = [torch.as_tensor(norm, dtype=torch.float64) for norm in optimizer._get_norm_groups()]
            return torch.linalg.vector_norm(torch.stack(norms)) / optimizer.loss_scale
        return None


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """DeepSpeed's optimizer: `step` is the engine's, which also forgets the gradients."""

    def __init__(self, engine: DeepSpeedEngineWrapper):
        super().__init__(engine.engine.optimizer, device_placement=False)
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step, where gradients wait for it. Raises `TrainingError` for a closure: the engine takes one backward to a step."""
        if closure is not None:
            raise TrainingError("DeepSpeed's optimizers take no closure.")
        self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine's step forgets the gradients."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because scaled gradients were infinite or no numbers."""
        return self._engine.step_was_skipped


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that DeepSpeed has made: the engine steps it, once with each step of the optimizer."""

    def __init__(self, scheduler: Any, optimizers: Any):
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine's step has done it."""
