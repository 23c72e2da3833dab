"""An optimizer that steps only where gradients are complete, and knows when the loss scale made it skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .gradient_state import GradientState
from .lomo import steps_in_backward
from .state import PartialState

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A torch optimizer in a loop that accumulates gradients: between synchronizations, `step` and `zero_grad` do nothing.

    Whatever else is asked of it (`state_dict`, `param_groups`, hooks, attributes of its own class) is asked of the optimizer inside.

    Args:
        optimizer: any torch optimizer.
        device_placement: state that is there already moves to this process's device.
        scaler: of half precision; gradients are unscaled before the step, and a step with infinite ones is skipped.
        after_scaled_step: called after a step with the scaler, in place of `scaler.update()`, by who shares one scaler between optimizers.

    Attributes:
        optimizer: the one inside.
        scaler: as given.
    """

    # Optimizer.__init__ is not called: parameters, state and hooks are those of the optimizer inside.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        after_scaled_step: Callable[[], None] | None = None,
    ):
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self._after_scaled_step = after_scaled_step or (None if scaler is None else scaler.update)
        self._stepped = True
        self._steps_in_backward = steps_in_backward(optimizer)
        if device_placement and optimizer.state:
            _move_state(optimizer, PartialState().device)
        if scaler is not None:
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers are always called, and look at what the scaler found themselves.
        found = getattr(optimizer, "found_inf", None)
        self._stepped = found is None or not bool(found)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps where gradients are complete (`GradientState.sync_gradients`); else nothing. Returns what the optimizer inside returns.

        One that has stepped in its backward (LOMO's) does nothing.
        """
        if not self.gradient_state.sync_gradients or self._steps_in_backward:
            return None
        self.gradient_state.gradients_wait = False
        if self.scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._stepped = False
        result = self.scaler.step(self.optimizer) if closure is None else self.scaler.step(self.optimizer, closure)
        assert self._after_scaled_step is not None
        self._after_scaled_step()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets gradients where they were complete; between, they go on being added up. None: torch's own default."""
        if self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because scaled gradients were infinite or no numbers."""
        return not self._stepped

    @property
    def state(self) -> Any:
        """State per parameter, of the optimizer inside."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and their options, of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of parameters that set none, of the optimizer inside."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As in torch."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch: state goes to the device of its parameter."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For optimizers with two modes (schedule-free ones); others do nothing."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """For optimizers with two modes (schedule-free ones); others do nothing."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __getattr__(self, name: str) -> Any:
        # Also finds the hook tables that the methods of torch's base class fill.
        if name in ("optimizer", "scaler"):  # not there yet: while it is unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for values in optimizer.state.values():
        for name, value in values.items():
            # Counters of steps stay on the host, where torch keeps them.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                values[name] = value.to(device)
