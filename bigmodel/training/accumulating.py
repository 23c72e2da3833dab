"""One batch of a loop that adds gradients up."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["Accumulation"]


class Accumulation:
    """The context of `Accelerator.accumulate`; a class, since a generator with an exit stack took 4 % of the step of a small model."""

    __slots__ = ("_accelerator", "_models", "_unsynchronized")

    def __init__(self, accelerator: Accelerator, models: tuple[nn.Module, ...]):
        self._accelerator = accelerator
        self._models = models
        self._unsynchronized: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        state = accelerator.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            accelerator.step = 0
            state.sync_gradients = True
        else:
            accelerator.step += 1
            state.sync_gradients = accelerator.step % state.num_steps == 0
        if state.sync_gradients or state.sync_each_batch or not self._models:
            return
        context = accelerator.strategy.no_sync(self._models[0]) if len(self._models) == 1 else self._all_unsynchronized()
        context.__enter__()
        self._unsynchronized = context

    @contextlib.contextmanager
    def _all_unsynchronized(self) -> Any:
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(self._accelerator.strategy.no_sync(model))
            yield

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        context, self._unsynchronized = self._unsynchronized, None
        return None if context is None else context.__exit__(kind, error, trace)
