"""Which process this is, how many there are, and which device it drives."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from ..devices import accelerators, collective_name
from ..errors import TrainingError
from ..settings import environment_flag
from .argument_types import refuse_wrong_arguments
from .enums import DistributedType
from .environment import LOCAL_RANK_VARIABLES, LOCAL_WORLD_VARIABLES, RANK_VARIABLES, WORLD_VARIABLES, get_int_from_env
from .group_end import end_groups, settle_groups
from .numa import set_numa_affinity
from .splitting import share_of

__all__ = ["PartialState", "wait_for_everyone"]

T = TypeVar("T")


class PartialState:
    """This process among its kin; every instance in a process shares one state, made by the first.

    Where `torch.distributed` runs already, its default group is taken; else, where a launcher (`torchrun`, MPI) has set ranks in the
    environment, the group is made; else there is one process. `cpu=True` keeps to the CPU (also `BIGMODEL_USE_CPU=1`).
    With `BIGMODEL_CPU_AFFINITY=1` the process runs on cores near its device, see `set_numa_affinity`.

    Args:
        cpu: compute on the CPU although there is an accelerator.
        backend: of `torch.distributed`; None: the one that torch names for the device (`gloo` on CPU, and where it names none).
        init_method: as in `torch.distributed.init_process_group`; None: the environment's rendezvous.
        timeout: of collectives; None: torch's.

    Attributes:
        num_processes, process_index: size of the group, and this process's rank in it.
        local_num_processes, local_process_index: the same on this host.
        device: where this process computes.
        distributed_type: `DistributedType.NO`, or `MULTI_` and the kind of device.
        backend: of the process group, None without one.
        debug: `BIGMODEL_DEBUG_MODE=1`, for scripts that ask; collectives check shapes always.

    Raises:
        TrainingError: ranks in the environment that make no sense, or other arguments than the state was made with.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    num_processes: int
    process_index: int
    local_num_processes: int
    local_process_index: int
    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    debug: bool

    def __init__(self, cpu: bool = False, *, backend: str | None = None, init_method: str | None = None, timeout: timedelta | None = None):
        self.__dict__ = self._shared_state
        if "num_processes" in self._shared_state:
            if cpu and self.device.type != "cpu":
                raise TrainingError(
                    f"This process already computes on {self.device}; ask for `cpu=True` where PartialState or Accelerator is made first."
                )
            return
        refuse_wrong_arguments(PartialState.__init__, type(self).__name__, locals())
        cpu = cpu or environment_flag("USE_CPU")
        world = dist.get_world_size() if dist.is_initialized() else get_int_from_env(WORLD_VARIABLES, 1)
        rank = dist.get_rank() if dist.is_initialized() else get_int_from_env(RANK_VARIABLES, 0)
        local_rank = get_int_from_env(LOCAL_RANK_VARIABLES, rank)
        local_world = get_int_from_env(LOCAL_WORLD_VARIABLES, world)
        if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
            raise TrainingError(
                f"The launcher's numbers make no sense: rank {rank} of {world}, on this host {local_rank} of {local_world}. "
                f"Start the script with torchrun, or unset {RANK_VARIABLES[0]}, {WORLD_VARIABLES[0]} and {LOCAL_RANK_VARIABLES[0]}."
            )
        there = [] if cpu else accelerators()
        device = there[local_rank % len(there)] if there else torch.device("cpu")
        if there:
            torch.accelerator.set_device_index(device.index)
        launched = world > 1 or ("RANK" in os.environ and "MASTER_ADDR" in os.environ)
        if launched and not dist.is_initialized():
            _start_group(device, rank, world, backend, init_method, timeout)
        self._shared_state.update(
            num_processes=world,
            process_index=rank,
            local_num_processes=local_world,
            local_process_index=local_rank,
            device=device,
            backend=dist.get_backend() if dist.is_initialized() else None,
            distributed_type=DistributedType(f"MULTI_{collective_name(device)}") if dist.is_initialized() else DistributedType.NO,
            debug=environment_flag("DEBUG_MODE"),
        )
        if environment_flag("CPU_AFFINITY"):
            set_numa_affinity(local_rank)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type!s}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    if not TYPE_CHECKING:  # or every name would be right

        def __getattr__(self, name: str) -> Any:  # where nothing else has the name
            if self.initialized or name.startswith("_"):
                return object.__getattribute__(self, name)
            kind = type(self).__name__
            raise AttributeError(
                f"`{kind}` object has no attribute {name!r}. This happens if `{kind}._reset_state()` was called: make an Accelerator or a "
                f"{kind} again before its settings are asked for."
            )

    @property
    def initialized(self) -> bool:
        """Whether the state of this process is known."""
        return "num_processes" in self._shared_state

    @property
    def default_device(self) -> torch.device:
        """The accelerator that torch would choose, or the CPU."""
        there = accelerators()
        return there[torch.accelerator.current_device_index()] if there else torch.device("cpu")

    def set_device(self) -> None:
        """Makes this process's device the current one, as it was when the state was made."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Returns once every process has called it."""
        if self.use_distributed:
            if self.device.type == "cpu":
                dist.barrier()
            else:
                dist.barrier(device_ids=[self.device.index])

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the body, then the others do: download or preprocess once, read the cache everywhere else."""
        yield from self._first(self.is_main_process)

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """On every host its first process runs the body, then the others do."""
        yield from self._first(self.is_local_main_process)

    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also when the body failed: the others would wait for ever.
            if first:
                self.wait_for_everyone()

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of `inputs`: consecutive pieces whose lengths differ by one at most, the longer ones first.

        Args:
            inputs: a list, tuple, range, tensor or numpy array (along the first dimension), a table of `datasets`, anything else
                with a length and slices, or a mapping of such, all of one length. A text goes to all, whole. Of one process it is the
                inputs themselves.
            apply_padding: shares are as long as the longest one, by repeating the last element of `inputs` (for `gather`).

        Raises:
            TrainingError: values of a mapping that differ in length, or an input that cannot be cut.
        """
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """`function`, called by the main process only; elsewhere it does nothing and returns None."""
        return self._only(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """`function`, called by the first process of each host only."""
        return self._only(function, self.is_local_main_process)

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """`function`, called by the process of the highest rank only."""
        return self._only(function, self.is_last_process)

    def on_process(self, function: Callable[..., T] | None = None, process_index: int | None = None) -> Callable[..., Any]:
        """`function`, called by the process of rank `process_index` only; without `function`, a decorator."""
        if function is None:
            return lambda function: self.on_process(function, process_index)
        return self._only(function, self.process_index == process_index)

    def on_local_process(self, function: Callable[..., T] | None = None, local_process_index: int | None = None) -> Callable[..., Any]:
        """`function`, called on each host by its process `local_process_index` only; without `function`, a decorator."""
        if function is None:
            return lambda function: self.on_local_process(function, local_process_index)
        return self._only(function, self.local_process_index == local_process_index)

    def _only(self, function: Callable[..., T], here: bool) -> Callable[..., T | None]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> T | None:
            return function(*args, **kwargs) if here else None

        return call

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, by the first process of each host only."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def destroy_process_group(self, group: Any = None) -> None:
        """Ends the process group, where there is one."""
        if dist.is_initialized():
            settle_groups(group)
            dist.destroy_process_group(group)

    @classmethod
    def _reset_state(cls) -> None:
        """Forgets everything, for tests; the process group stays."""
        cls._shared_state.clear()


def _start_group(
    device: torch.device, rank: int, world: int, backend: str | None, init_method: str | None, timeout: timedelta | None
) -> None:
    if init_method is None and ("MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ):
        raise TrainingError(
            f"This is process {rank} of {world} by the environment, but MASTER_ADDR and MASTER_PORT do not tell where they meet. "
            "Start the script with torchrun, or set both."
        )
    dist.init_process_group(backend or _backend_for(device), init_method=init_method, timeout=timeout, rank=rank, world_size=world)
    atexit.register(end_groups)


def _backend_for(device: torch.device) -> str:
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:  # a device that torch knows no collectives for: tensors travel through the host
        return "gloo"


def wait_for_everyone() -> None:
    """Returns once every process has called it; each one must."""
    PartialState().wait_for_everyone()
