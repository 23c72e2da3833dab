"""The scale of losses in half precision, which several optimizers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import TrainingError
from .optimizer import AcceleratedOptimizer

__all__ = ["LossScale"]


class LossScale:
    """A gradient scaler, and when it may change its scale: not before every optimizer that steps on the same backward has stepped.

    `GradScaler.update` forgets which gradients are unscaled and may change the scale, so it waits for the next backward.

    Attributes:
        scaler: torch's own.
    """

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler
        self._due = False
        self._unscaled: set[int] = set()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for a backward."""
        self.update()
        return self.scaler.scale(loss)

    def note_step(self) -> None:
        """An optimizer has stepped with the scaler."""
        self._due = True

    def update(self) -> None:
        """Lets the scale grow or shrink, if a step has been taken since."""
        if self._due:
            self.scaler.update()
            self._due = False
            self._unscaled.clear()

    def unscale(self, optimizers: Sequence[AcceleratedOptimizer], parameters: Iterable[torch.Tensor] | None, complete: bool) -> None:
        """Gradients of the optimizers that own some of the parameters (None: of all) in their true size; once between steps.

        Raises `TrainingError` where gradients are not `complete`: those of the next batch would be added in another size.
        """
        if not complete:
            raise TrainingError(
                "Gradients are still being accumulated, so they cannot be clipped or unscaled now: "
                "do it where `accelerator.sync_gradients` is True."
            )
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for optimizer in optimizers:
            inner = optimizer.optimizer
            if id(inner) in self._unscaled:
                continue
            if wanted is None or any(id(parameter) in wanted for group in inner.param_groups for parameter in group["params"]):
                self.scaler.unscale_(inner)
                self._unscaled.add(id(inner))
