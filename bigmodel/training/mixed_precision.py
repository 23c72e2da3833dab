"""Half-precision forwards: the context that they run in, and the scaler that keeps fp16 gradients from vanishing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .accelerator_state import AcceleratorState
from .enums import DistributedType
from .handlers import AutocastKwargs
from .state import PartialState

__all__ = ["get_grad_scaler", "get_mixed_precision_context_manager"]

COMPUTE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What autocast casts to. Under fp8 the layers that can compute in it do so themselves, all others in bf16."""


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """The gradient scaler for this process's device.

    Args:
        distributed_type: `DistributedType.FSDP` gives the scaler whose steps are skipped on all processes or on none, whichever shard
            overflows.
        kwargs: arguments of `torch.amp.GradScaler`, such as `GradScalerKwargs(…).to_kwargs()`.
    """
    device = PartialState().device.type
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """The context for forwards in this process's precision (`AcceleratorState().mixed_precision`) on its device.

    Args:
        native_amp: whether torch's autocast is used; False gives a context that does nothing.
        autocast_kwargs: how it is made.

    With the precision `"no"`, autocast has the dtype that torch prefers for the device.
    """
    if not native_amp:
        return contextlib.nullcontext()
    state = AcceleratorState()
    kwargs = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, COMPUTE_DTYPES.get(state.mixed_precision), **kwargs)
