"""Local SGD: processes train on their own for some steps, then take the mean of their weights (Stich, 2018, arXiv:1805.09767)."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import TrainingError
from .reduction import reduce

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """A context in which gradients stay in their process, and weights are averaged over processes every `local_sgd_steps` optimizer steps.

    Call `step()` after each optimizer step. On leaving, weights are averaged once more.

    Args:
        accelerator: with one process, or with a copy of the model in each.
        model: prepared.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False: nothing is changed.

    Raises:
        TrainingError: a model that is spread over processes, or fewer than one step.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True):
        if local_sgd_steps < 1:
            raise TrainingError(f"local_sgd_steps={local_sgd_steps}: weights are averaged after at least one step.")
        kind = accelerator.distributed_type.value
        if enabled and not kind.startswith(("MULTI_", "NO")):
            raise TrainingError(f"LocalSGD averages whole copies of a model; {kind} spreads it over processes.")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._context = contextlib.ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._context.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._context:
            # After an error the other processes may never come to average.
            if self.enabled and kind is None:
                self._average()

    def step(self) -> None:
        """Counts an optimizer step; averages weights where it is the last of `local_sgd_steps`."""
        if not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        weights = [parameter.detach() for parameter in self.model.parameters()]
        for weight, mean in zip(weights, reduce(weights, reduction="mean"), strict=True):
            weight.copy_(mean)
