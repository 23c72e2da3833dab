"""When gradients are synchronized, and where the loops over data loaders stand."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Protocol

__all__ = ["AccumulationPlugin", "GradientState", "LoopedLoader"]


class AccumulationPlugin(Protocol):
    """What is read of a `GradientAccumulationPlugin`."""

    num_steps: int | None
    adjust_scheduler: bool
    sync_with_dataloader: bool
    sync_each_batch: bool


class LoopedLoader(Protocol):
    """What is read of a data loader while somebody loops over it."""

    end_of_dataloader: bool
    """Whether the batch handed out last was the last one."""
    remainder: int
    """Where the batch handed out repeats samples, how many of those of all processes together are none; 0: the last batch, and nothing is
    repeated; in one process, the samples of a last batch that is not full; -1: not the last batch, or not known."""


class GradientState:
    """Gradient accumulation in this process; every instance shares one state, and a plugin given later replaces the settings.

    Attributes:
        sync_gradients: whether this step's gradients are synchronized, and the optimizer steps.
        gradients_wait: whether `Accelerator.backward` has added gradients since a prepared optimizer stepped last.
        plugin_kwargs: the settings by name, as below; a change counts at once.
        num_steps: batches whose gradients are added up before a step.
        adjust_scheduler: as in `GradientAccumulationPlugin`.
        sync_with_dataloader: whether the last batch of a loader ends the accumulation.
        sync_each_batch: whether every batch is synchronized, which saves memory and costs time.
        dataloader_references: None, then the loaders in whose loops this process is, innermost last; they are not kept alive.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    gradients_wait: bool
    plugin_kwargs: dict[str, Any]
    _loaders: list[weakref.ref[Any]]

    def __init__(self, gradient_accumulation_plugin: AccumulationPlugin | None = None):
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self.gradients_wait = False
            self.plugin_kwargs = {"num_steps": 1, "adjust_scheduler": True, "sync_with_dataloader": True, "sync_each_batch": False}
            self._loaders = []
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = {
                "num_steps": gradient_accumulation_plugin.num_steps or 1,
                "adjust_scheduler": gradient_accumulation_plugin.adjust_scheduler,
                "sync_with_dataloader": gradient_accumulation_plugin.sync_with_dataloader,
                "sync_each_batch": gradient_accumulation_plugin.sync_each_batch,
            }

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Samples in the last batch: {self.remainder}\nGradient accumulation: {self.plugin_kwargs}\n"
        )

    @property
    def initialized(self) -> bool:
        """Whether the state has been made."""
        return "sync_gradients" in self._shared_state

    @property
    def num_steps(self) -> int:
        """Batches whose gradients are added up before a step."""
        return int(self.plugin_kwargs["num_steps"])

    @property
    def adjust_scheduler(self) -> bool:
        """As in `GradientAccumulationPlugin`."""
        return bool(self.plugin_kwargs["adjust_scheduler"])

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the accumulation."""
        return bool(self.plugin_kwargs["sync_with_dataloader"])

    @property
    def sync_each_batch(self) -> bool:
        """Whether every batch is synchronized."""
        return bool(self.plugin_kwargs["sync_each_batch"])

    @property
    def dataloader_references(self) -> list[LoopedLoader | None]:
        """None, then the loaders in whose loops this process is, innermost last."""
        return [None, *(loader for reference in self._loaders if (loader := reference()) is not None)]

    @property
    def active_dataloader(self) -> LoopedLoader | None:
        """The loader of the innermost loop; None outside of loops."""
        for reference in reversed(self._loaders):
            loader = reference()
            if loader is not None:
                return loader
        return None

    @property
    def in_dataloader(self) -> bool:
        """Whether this process is in a loop over a loader."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loop has its last batch; False outside of loops."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The innermost loop's `LoopedLoader.remainder`; -1 outside of loops."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """For scripts that count accumulation steps themselves."""
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: LoopedLoader) -> None:
        """Called by a loader where a loop over it begins."""
        self._loaders.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: LoopedLoader) -> None:
        """Called by a loader where a loop over it ends, whichever way; harmless when it is not there."""
        for position in range(len(self._loaders) - 1, -1, -1):
            if self._loaders[position]() is dataloader:
                del self._loaders[position]
                return

    @classmethod
    def _reset_state(cls) -> None:
        """Forgets everything, for tests."""
        cls._shared_state.clear()
