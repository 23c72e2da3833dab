"""Autocast in the process's precision, and the scaler of its device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes

from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.enums import DistributedType
from bigmodel.training.handlers import AutocastKwargs, GradScalerKwargs
from bigmodel.training.mixed_precision import get_grad_scaler, get_mixed_precision_context_manager


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)])
def test_forwards_compute_in_the_precision_of_the_process(precision: str, dtype: torch.dtype) -> None:
    AcceleratorState(precision, cpu=True)
    weight = torch.ones(2, 2)
    with get_mixed_precision_context_manager(native_amp=True):
        assert (weight @ weight).dtype == dtype
    with get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=AutocastKwargs(enabled=False)):
        assert (weight @ weight).dtype == torch.float32
    with get_mixed_precision_context_manager():
        assert (weight @ weight).dtype == torch.float32


def test_full_precision_needs_no_autocast() -> None:
    AcceleratorState("no", cpu=True)
    assert isinstance(get_mixed_precision_context_manager(), contextlib.nullcontext)
    with get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=AutocastKwargs(cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_the_accelerator_computes_in_the_precision_of_the_process(accelerators: Any) -> None:
    (device,) = accelerators(1)
    AcceleratorState("bf16")
    weight = torch.ones(2, 2, device=device)
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.is_autocast_enabled(device.type)
        assert (weight @ weight).dtype == torch.bfloat16
    assert get_grad_scaler()._device == device.type


def steps_with(scaler: torch.amp.GradScaler, factors: list[float]) -> list[tuple[float, float]]:
    """A weight of 1 and the scale after steps of SGD at rate 1 whose gradients are `factors`."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen = []
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((weight.item(), scaler.get_scale()))
    return seen


def test_steps_that_overflow_are_skipped_and_shrink_the_scale() -> None:
    scaler = get_grad_scaler(**GradScalerKwargs(init_scale=8.0, growth_interval=2).to_kwargs())
    assert steps_with(scaler, [0.25, float("inf"), 0.25, 0.5]) == [(0.75, 8.0), (0.75, 4.0), (0.5, 4.0), (0.0, 8.0)]
    off = get_grad_scaler(DistributedType.NO, enabled=False)
    assert steps_with(off, [0.25]) == [(0.75, 1.0)]


def overflow_in_rank_1(kind: str) -> list[tuple[float, float]]:
    scaler = get_grad_scaler(kind, init_scale=8.0)
    return steps_with(scaler, [0.25, float("inf") if dist.get_rank() == 1 else 0.25, 0.25])


def sharded_overflow() -> tuple[list[float], float]:
    """The same with one sharded weight; the gradient of the rows that rank 1 holds overflows in the second of three steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = get_grad_scaler(DistributedType.FSDP, init_scale=8.0)
    for factor in (0.25, float("inf"), 0.25):
        optimizer.zero_grad()
        scaler.scale(torch.zeros(()))  # as in a forward: makes the scale
        local = torch.full((2,), scaler.get_scale() * (factor if dist.get_rank() == 1 else 0.25))
        weight.grad = DTensor.from_local(local, mesh, [Shard(0)])
        scaler.step(optimizer)
        scaler.update()
    return weight.full_tensor().tolist(), scaler.get_scale()


@pytest.mark.xdist_group("processes")
def test_shards_skip_a_step_together(processes: Any) -> None:
    pool: Processes = processes(2)
    together = [(0.75, 8.0), (0.75, 4.0), (0.5, 4.0)]
    assert pool.run(overflow_in_rank_1, "FSDP") == [together, together]
    assert pool.run(sharded_overflow) == [([0.5] * 4, 4.0)] * 2
