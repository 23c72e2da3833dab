"""Stand for the optimizer and the scheduler that DeepSpeed's config describes, and DeepSpeed makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim:
    """In the place of an optimizer, where the config has `"optimizer"`.

    Args:
        params: parameters, or groups of them, to train.
        lr, weight_decay: for the config's `"auto"` values.
        kwargs: other `"auto"` values of `optimizer.params`, such as `betas` and `eps`.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any):
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """In the place of a scheduler, where the config has `"scheduler"`, or where it can only be made of DeepSpeed's optimizer.

    Args:
        optimizer: the optimizer, or the `DummyOptim`.
        total_num_steps, warmup_num_steps: of one process that has all the data; for the config's `"auto"` values.
        lr_scheduler_callable: makes the scheduler of the optimizer that it is given; the config has no `"scheduler"` then.
        kwargs: other `"auto"` values of `scheduler.params`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ):
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
