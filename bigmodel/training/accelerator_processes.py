"""The part of `Accelerator` that is about processes: which one this is, who does what first, and what they have together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .accelerator_state import AcceleratorState
from .collectives import gather, pad_across_processes
from .enums import DistributedType
from .reduction import reduce

__all__ = ["ProcessMethods"]

T = TypeVar("T")


class ProcessMethods:
    """Questions and orders to the group of processes; `PartialState` answers them."""

    state: AcceleratorState
    _trigger: torch.Tensor | None

    @property
    def distributed_type(self) -> DistributedType:
        """How processes work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its host."""
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.state.device

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process, each with an accelerator of its own."""
        return self.state.use_distributed and self.state.device.type != "cpu"

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.state.is_last_process

    def wait_for_everyone(self) -> None:
        """Returns once every process has called it."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, by the first process of each host only."""
        self.state.print(*args, **kwargs)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process runs the body, then the others do."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """On every host its first process runs the body, then the others do."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> contextlib.AbstractContextManager[Any]:
        """This process's share of `inputs`, see `PartialState.split_between_processes`."""
        return self.state.split_between_processes(inputs, apply_padding)

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """`function`, called by the main process only; elsewhere it does nothing and returns None."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """`function`, called by the first process of each host only."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """`function`, called by the process of the highest rank only."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., T] | None = None, process_index: int | None = None) -> Callable[..., Any]:
        """`function`, called by the process of that rank only; without `function`, a decorator."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Callable[..., T] | None = None, local_process_index: int | None = None) -> Callable[..., Any]:
        """`function`, called on each host by its process of that rank only; without `function`, a decorator."""
        return self.state.on_local_process(function, local_process_index)

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, in any structure, joined along their first dimension, in the order of ranks."""
        return gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors of all processes, in any structure, added up (`"mean"`, `"max"`, … see `utils.reduce`), times `scale`."""
        return reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors, in any structure, as long along `dim` as the longest among all processes, filled up with `pad_index`."""
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Tells all processes something (an early stop, say) that they learn from `check_trigger`."""
        self._trigger = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check. All processes call it together."""
        own = torch.tensor(0, device=self.device) if self._trigger is None else self._trigger
        raised = bool(reduce(own, "sum") > 0)
        if raised:
            self._trigger = None
        return raised
