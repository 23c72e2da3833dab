"""`ParallelismConfig`: how the processes of a job divide data, parameters and sequences between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import TrainingError
from .argument_types import refuse_wrong_fields
from .enums import DistributedType

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelismConfig"]


@dataclass
class ParallelismConfig:
    """The numbers of processes along each dimension of a grid; their product is the number of all. None is 1.

    Processes that stand next to each other share sequences, then parameters, then come the copies of all that.

    Raises:
        TrainingError: numbers below 1; and, from `Accelerator`, those that it does nothing with, or that are not those of its processes.
    """

    dp_replicate_size: int | None = None
    """Copies of the model, whose gradients are averaged."""
    dp_shard_size: int | None = None
    """Processes over which an `fsdp_plugin` shards parameters; with copies as well, this is hybrid sharding."""
    tp_size: int | None = None
    """Processes that share each matrix. `Accelerator` refuses more than one: with `MegatronLMPlugin(tp_degree=…)` it does that."""
    cp_size: int | None = None
    """Processes that share each sequence: they are given the same samples, of which the script takes its part, and shard parameters too."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise TrainingError(f"{field.name}={size}: there is at least 1 process along each dimension.")
            setattr(self, field.name, size or 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of processes by the names of the mesh's dimensions, in their order."""
        return {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "cp": self.cp_size or 1,
            "tp": self.tp_size or 1,
        }

    @property
    def total_size(self) -> int:
        """All processes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Processes that see samples of their own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are copies."""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded over processes that see other samples."""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether matrices are shared."""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are shared."""
        return self.sizes["cp"] > 1

    # What transformers' Trainer asks besides: who divides sequences. Nobody does but the script.
    cp_backend = None
    sp_backend = None
    sp_size = 1
    sp_enabled = False

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """A mesh over all processes, with dimensions `dp_replicate`, `dp_shard`, `cp` and `tp`; all processes call it."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes))

    def sharding(self) -> tuple[int, int]:
        """Copies, and the parts of each."""
        return self.sizes["dp_replicate"], self.sizes["dp_shard"] * self.sizes["cp"]

    def refuse_what_is_not_done(self, num_processes: int, distributed_type: DistributedType, fsdp_plugin: Any) -> None:
        """Raises `TrainingError` for sizes that `Accelerator` does nothing with, or that are those of another number of processes."""
        said = ", ".join(f"{name}_size={size}" for name, size in self.sizes.items() if size > 1) or "all sizes 1"
        if self.tp_enabled:
            raise TrainingError(
                f"ParallelismConfig({said}): Accelerator does not train matrices that processes share (tp_size). Use "
                "MegatronLMPlugin(tp_degree=…), or dp_shard_size with a FullyShardedDataParallelPlugin."
            )
        if distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise TrainingError(
                f"ParallelismConfig({said}): {distributed_type.value} divides processes as its own plugin says; leave one out."
            )
        if self.total_size != num_processes:
            raise TrainingError(
                f"ParallelismConfig({said}) divides {self.total_size} processes, and there are {num_processes}: the product of all sizes "
                "is their number."
            )
        if self.dp_shard_enabled and fsdp_plugin is None:
            raise TrainingError(
                f"ParallelismConfig({said}): a FullyShardedDataParallelPlugin shards (fsdp_plugin=…). Without one, processes have copies: "
                "dp_replicate_size."
            )
        strategy = None if fsdp_plugin is None else fsdp_plugin.sharding_strategy.name
        if strategy is not None and strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise TrainingError(
                f"ParallelismConfig({said}) and sharding_strategy={strategy} both say which processes have copies: leave the plugin's at "
                "FULL_SHARD or SHARD_GRAD_OP."
            )
