"""A learning-rate scheduler that goes with the optimizer's steps, whatever the number of processes and of accumulated batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .gradient_state import GradientState
from .state import PartialState

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """A scheduler that steps where its optimizers have stepped.

    A scheduler is made for the batches of one process. With N processes that each take batches of their own, one step of the optimizer has
    seen N of them, so the scheduler steps N times (once where `split_batches`: batches are then what the script asked for). It stops at
    its own `total_steps`. Schedulers that look at a metric (`ReduceLROnPlateau`) count looks, not batches: they step once.

    Args:
        scheduler: any torch scheduler.
        optimizers: whose steps it follows.
        step_with_optimizer: False: every call is a step of the scheduler, once.
        split_batches: whether loaders split the script's batches between processes.
        num_processes: those that take batches of their own; None: all.

    Attributes:
        scheduler: the one inside; whatever else is asked of this object is asked of it.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        num_processes: int | None = None,
    ):
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.num_processes = num_processes
        self.gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps if gradients were synchronized and no optimizer skipped its step; takes the arguments of the scheduler inside."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            # Schedulers that are made for a number of batches count those without a step too, so that they end with the data.
            if self.gradient_state.adjust_scheduler and hasattr(scheduler, "_step_count"):
                scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if getattr(optimizer, "step_was_skipped", False):
                return
        times = 1 if self.split_batches or isinstance(scheduler, ReduceLROnPlateau) else self.num_processes or PartialState().num_processes
        total = getattr(scheduler, "total_steps", None)
        for _ in range(times):
            # Beyond its last step a schedule turns round, and the loop may go on.
            if total is None or (scheduler._step_count <= total and scheduler.last_epoch + 1 < total):
                scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[float]:
        """As in the scheduler inside."""
        return list(self.scheduler.get_lr())

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """As in the scheduler inside."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """As in the scheduler inside."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the scheduler inside."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)
