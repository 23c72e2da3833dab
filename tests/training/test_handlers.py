"""What handlers pass on to torch, and what torch then does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch.nn.parallel import DistributedDataParallel

from bigmodel.errors import TrainingError
from bigmodel.training.enums import DDPCommunicationHookType
from bigmodel.training.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)


@dataclass
class Settings(KwargsHandler):
    steps: int = 0
    loud: bool = False
    rate: float = 3.0
    names: list[str] = field(default_factory=list)


def test_only_what_differs_from_the_defaults_is_passed_on() -> None:
    assert Settings().to_kwargs() == {}
    assert Settings(steps=2).to_kwargs() == {"steps": 2}
    assert Settings(steps=2, loud=True, names=["a"]).to_kwargs() == {"steps": 2, "loud": True, "names": ["a"]}
    changed = Settings()
    changed.rate = 2.25
    assert changed.to_kwargs() == {"rate": 2.25}


def test_autocast_and_scaler_take_the_arguments() -> None:
    weight = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16, **AutocastKwargs().to_kwargs()):
        assert (weight @ weight).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, **AutocastKwargs(enabled=False, cache_enabled=False).to_kwargs()):
        assert (weight @ weight).dtype == torch.float32
    scaler = torch.amp.GradScaler("cpu", **GradScalerKwargs(init_scale=1024, growth_factor=4, growth_interval=7).to_kwargs())
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_growth_interval()) == (1024, 4, 7)
    assert (scaler.get_backoff_factor(), scaler.is_enabled()) == (0.5, True)


def test_the_process_group_takes_what_was_chosen() -> None:
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs().timeout == timedelta(minutes=10)
    assert InitProcessGroupKwargs(backend="gloo").timeout == timedelta(minutes=30)
    assert InitProcessGroupKwargs(backend="gloo").to_kwargs() == {"backend": "gloo", "timeout": timedelta(minutes=30)}
    assert InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=10)).to_kwargs()["timeout"] == timedelta(minutes=10)
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=800)).to_kwargs() == {"timeout": timedelta(seconds=800)}
    assert InitProcessGroupKwargs(backend=None, init_method="file:///tmp/meet").to_kwargs() == {
        "backend": None,
        "init_method": "file:///tmp/meet",
        "timeout": timedelta(minutes=30),
    }


def test_hooks_are_no_arguments_of_the_wrapper() -> None:
    assert DistributedDataParallelKwargs().to_kwargs() == {}
    handler = DistributedDataParallelKwargs(bucket_cap_mb=15, find_unused_parameters=True, comm_hook="power_sgd", comm_wrapper="bf16")  # type: ignore[arg-type]
    assert handler.comm_hook is DDPCommunicationHookType.POWER_SGD
    assert handler.comm_wrapper is DDPCommunicationHookType.BF16
    assert handler.to_kwargs() == {"bucket_cap_mb": 15, "find_unused_parameters": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comm_hook": "fp8"}, "comm_hook='fp8'.*'batched_power_sgd'"),
        ({"comm_wrapper": "power_sgd"}, "comm_wrapper='power_sgd'.*'bf16'"),
        ({"comm_hook": "fp16", "comm_state_option": {"start_powerSGD_iter": 2}}, "start_powerSGD_iter.*'fp16'"),
    ],
)
def test_hooks_that_do_not_exist_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        DistributedDataParallelKwargs(**arguments)


HOOKED: list[dict[str, Any]] = [
    {},
    {"comm_wrapper": "bf16"},
    {"comm_hook": "fp16"},
    {"comm_hook": "bf16"},
    {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2, "min_compression_rate": 1}},
    {"comm_hook": "batched_power_sgd", "comm_wrapper": "fp16", "comm_state_option": {"start_powerSGD_iter": 2}},
]


def gradients_with(arguments: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Gradients of the weight in four steps with each handler; rank r's own gradient is (r + 1) × a matrix of rank one."""
    steps: list[list[torch.Tensor]] = []
    row, column = torch.linspace(-1, 1, 6), torch.linspace(1, 2, 5)
    for each in arguments:
        handler = DistributedDataParallelKwargs(**each)
        model = DistributedDataParallel(torch.nn.Linear(6, 5, bias=False), **handler.to_kwargs())
        handler.register_comm_hook(model)
        steps.append([])
        for _ in range(4):
            model.zero_grad()
            output = model(row * (dist.get_rank() + 1))
            (output * column).sum().backward()
            steps[-1].append(model.module.weight.grad.clone())
    return steps


@pytest.mark.xdist_group("processes")
def test_hooks_compress_gradients_that_are_still_the_mean(processes: Any) -> None:
    pool: Processes = processes(2)
    mean = 1.5 * torch.outer(torch.linspace(1, 2, 5), torch.linspace(-1, 1, 6))
    first, second = pool.run(gradients_with, HOOKED)
    for arguments, here, there in zip(HOOKED, first, second, strict=True):
        rounded = max((torch.finfo(torch.bfloat16 if "bf16" in arguments.values() else torch.float16).eps, 1e-7)) if arguments else 1e-7
        for step, other in zip(here, there, strict=True):
            assert torch.equal(step, other)  # both ranks have the same
            torch.testing.assert_close(step, mean, rtol=2 * rounded, atol=2 * rounded)
    exact, wrapped, half, brain = (gradients[0] for gradients in first[:4])
    assert not torch.equal(half, exact)
    assert not torch.equal(brain, exact)
    assert torch.equal(wrapped, wrapped.bfloat16().float())


def test_a_profile_records_what_was_asked_for_and_writes_its_trace(tmp_path: Path) -> None:
    heard: list[Any] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=heard.append,
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        output_trace_dir=str(tmp_path / "traces"),
    )
    weight = torch.ones(8, 8)
    with handler.build() as profiler:
        for _ in range(5):
            weight @ weight
            profiler.step()
    assert heard == [profiler]
    product = next(event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm")
    assert (product.count, product.flops, product.input_shapes[:2]) == (2, 2 * 2 * 8**3, [[8, 8], [8, 8]])
    trace = json.loads((tmp_path / "traces" / "profile_0.json").read_text())
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2


def test_a_profile_needs_no_settings() -> None:
    with ProfileKwargs().build() as profiler:
        torch.ones(4).sum()
    assert "aten::sum" in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activities": ["cpu", "gpu"]}, "'gpu'.*'cpu'"),
        ({"schedule_option": {"active": 1, "warm_up": 1}}, "warm_up.*warmup"),
        ({"schedule_option": {"wait": 1}}, "needs 'active'"),
    ],
)
def test_profiles_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        ProfileKwargs(**arguments).build()
