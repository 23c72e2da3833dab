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
    seen N of them, so the scheduler steps N times (once where `split_batches`: batches are then what the script asked for). It takes its
    own `total_steps` and no more. Schedulers that look at a metric (`ReduceLROnPlateau`) count looks, not batches: they step once.

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
            return
        for optimizer in self.optimizers:
            if getattr(optimizer, "step_was_skipped", False):
                return
        times = 1 if self.split_batches or isinstance(scheduler, ReduceLROnPlateau) else self.num_processes or PartialState().num_processes
        total, taken = getattr(scheduler, "total_steps", None), getattr(scheduler, "last_epoch", None)
        if total is not None and taken is not None:
            # Filled-up batches of several processes are more than the script counted, and torch refuses to go beyond the end.
            times = min(times, total - taken)
        for _ in range(times):
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
