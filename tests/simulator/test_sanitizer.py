"""The sanitizer: accesses in no order raise, however the timing fell; ordered ones never do."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def devices(accelerators) -> list[torch.device]:
    return accelerators(2)


def pinned(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value).pin_memory()


def unordered(match: str = "unordered access"):
    return pytest.raises(RuntimeError, match=match)


@pytest.fixture
def side() -> torch.Stream:
    return torch.sim.Stream(0)


def fetch(side: torch.Stream) -> torch.Tensor:
    with side:
        return pinned(1000).to("sim:0", non_blocking=True)


def test_read_after_write(side) -> None:
    there = fetch(side)
    time.sleep(0.02)  # long done, and still an error
    with unordered("on stream 0 of device 0 reads memory that stream [1-8] of device 0 writes"):
        there + 0
    (hazard,) = torch.sim.take_hazards()
    assert "no event, stream or device synchronization" in hazard


@pytest.mark.parametrize("wait", ["event", "stream", "device", "event on the host"])
def test_ordered_reads(side, wait: str) -> None:
    there = fetch(side)
    event = side.record_event()
    if wait == "event":
        torch.accelerator.current_stream(0).wait_event(event)
    elif wait == "stream":
        torch.accelerator.current_stream(0).wait_stream(side)
    elif wait == "device":
        torch.accelerator.synchronize()
    else:
        event.synchronize()
    assert (there + 0).sum().item() == 1000


def test_write_after_read(side) -> None:
    out, there = pinned(1000, 0.0), torch.ones(1000, device="sim:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        out.copy_(there, non_blocking=True)
    with unordered("writes"):
        there.zero_()
    torch.accelerator.synchronize()
    there.zero_()
    assert len(torch.sim.take_hazards()) == 1


def test_parts_of_one_storage(side) -> None:
    buffer = torch.zeros(2000, device="sim:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        buffer[:1000].copy_(pinned(1000), non_blocking=True)
    buffer[1000:] + 1  # bytes of its own
    with unordered():
        buffer + 1
    assert len(torch.sim.take_hazards()) == 1


def test_staging_memory_reused_by_another_stream_too_early(side) -> None:
    buffer, staging = torch.zeros(2000, device="sim:0"), pinned(1000)
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        buffer[:1000].copy_(staging, non_blocking=True)
    with unordered("writes"):
        staging.copy_(buffer[1000:], non_blocking=True)
    torch.accelerator.synchronize()
    assert len(torch.sim.take_hazards()) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_freed_while_another_stream_uses_it(side, recorded: bool) -> None:
    there = torch.ones(1000, device="sim:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        there + 1
    if recorded:
        there.record_stream(side)
    del there
    assert ["record_stream" in hazard for hazard in torch.sim.take_hazards()] == ([] if recorded else [True])


def test_autograd_over_devices_and_streams(side) -> None:
    first, second = nn.Linear(8, 8).to("sim:0"), nn.Linear(8, 1).to("sim:1")
    for _ in range(3):
        second(first(torch.ones(2, 8, device="sim:0")).to("sim:1")).sum().backward()
    with side:
        x = torch.ones(8, device="sim:0", requires_grad=True)
        y = (x * 2).sum()
    torch.accelerator.current_stream(0).wait_stream(side)
    y.backward()
    torch.accelerator.synchronize()
    assert x.grad is not None
    assert x.grad.sum().item() == 16


@pytest.mark.parametrize("queued_kernels", [False, True])
def test_a_prefetching_loop_has_no_hazards_and_right_values(accelerators, side, queued_kernels: bool) -> None:
    accelerators(1, queued_kernels=queued_kernels, copy_delay_ms=1)
    torch.manual_seed(0)
    weights = [(torch.randn(64, 64) / 8).pin_memory() for _ in range(8)]
    wanted = torch.ones(4, 64)
    for weight in weights:
        wanted = wanted @ weight

    main = torch.accelerator.current_stream(0)

    def fetch_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        with side:
            there = weight.to("sim:0", non_blocking=True)
            return there, side.record_event()

    x = torch.ones(4, 64, device="sim:0")
    fetched = fetch_weight(weights[0])
    for following in [*weights[1:], None]:
        there, event = fetched
        main.wait_event(event)
        there.record_stream(main)
        if following is not None:
            fetched = fetch_weight(following)
        x = x @ there
    assert torch.equal(x.cpu(), wanted)
