"""Queued copies and kernels: what runs behind, what waits for what, and what a missing wait shows."""

from __future__ import annotations

import time

import pytest
import torch

DELAY = 0.05  # seconds before each queued copy


@pytest.fixture
def devices(accelerators) -> list[torch.device]:
    return accelerators(2, copy_delay_ms=DELAY * 1000, sanitize=False)


def pinned(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value).pin_memory()


def seconds(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def test_copies_from_pinned_memory_run_behind_in_stream_order(devices) -> None:
    source = pinned(1000)
    there = source.to("sim:0", non_blocking=True)
    assert not torch.accelerator.current_stream(0).query()
    assert (there + 1).sum().item() == 2000  # runs after the copy, being on its stream
    assert torch.accelerator.current_stream(0).query()
    torch.ones(1000).to("sim:0", non_blocking=True)  # not pinned: done at once
    assert torch.sim.link_stats(0)["h2d"]["queued"] == 1
    assert torch.sim.link_stats(0)["h2d"]["copies"] == 2


def test_a_missing_wait_reads_poison(devices) -> None:
    source, side = pinned(1000), torch.sim.Stream(0)

    def fetch() -> torch.Tensor:
        with side:
            return source.to("sim:0", non_blocking=True)

    there = fetch()
    assert torch.isnan(there + 0).all()
    side.synchronize()
    assert there.sum().item() == 1000

    there = fetch()
    torch.accelerator.current_stream(0).wait_stream(side)
    assert there.sum().item() == 1000

    there = fetch()
    torch.accelerator.current_stream(0).wait_event(side.record_event())
    assert there.sum().item() == 1000

    there = fetch()
    event = side.record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert there.sum().item() == 1000


def test_a_source_overwritten_too_early_shows(devices) -> None:
    source = pinned(1000)
    there = source.to("sim:0", non_blocking=True)
    source.fill_(5.0)
    assert there.sum().item() == 5000


def test_copies_to_the_host(devices) -> None:
    there = torch.full((1000,), 3.0, device="sim:0")
    host = pinned(1000, 0.0)
    host.copy_(there, non_blocking=True)
    assert host.sum().item() == 0  # too early
    torch.accelerator.synchronize()
    assert host.sum().item() == 3000
    pinned_by_torch = there.to("cpu", non_blocking=True)
    assert pinned_by_torch.is_pinned()
    pageable = torch.zeros(1000)
    pageable.copy_(there, non_blocking=True)  # not pinned: done at once
    assert pageable.sum().item() == 3000
    assert pinned_by_torch.sum().item() == 3000  # same stream, hence earlier


def test_the_other_device_waits_for_a_copy_between_devices(devices) -> None:
    there = torch.full((1000,), 3.0, device="sim:0")
    assert there.to("sim:1", non_blocking=True).sum().item() == 3000


def test_tensors_may_go_while_a_copy_uses_them(devices) -> None:
    for _ in range(3):
        source = pinned(1 << 16)
        there = source.to("sim:0", non_blocking=True)
        del source, there
    torch.accelerator.synchronize()
    assert torch.sim.memory_allocated(0) == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_record_stream_puts_off_the_free(devices, recorded: bool) -> None:
    side, host = torch.sim.Stream(0), pinned(1 << 16, 0.0)
    there = torch.ones(1 << 16, device="sim:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        host.copy_(there, non_blocking=True)
    if recorded:
        there.record_stream(side)
    del there
    assert (torch.sim.memory_allocated(0) > 0) == recorded
    side.synchronize()
    assert torch.sim.memory_allocated(0) == 0


def test_an_allocation_waits_for_frees_put_off_before_it_fails(accelerators) -> None:
    accelerators(1, memory="1MiB", copy_delay_ms=DELAY * 1000)
    side, host = torch.sim.Stream(0), pinned(200 * 1024, 0.0)
    there = torch.ones(200 * 1024, device="sim:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        host.copy_(there, non_blocking=True)
    there.record_stream(side)
    del there
    assert torch.ones(200 * 1024, device="sim:0").sum().item() == 200 * 1024


def test_queued_kernels_run_in_order_and_tell_their_errors_later(accelerators) -> None:
    accelerators(1, queued_kernels=True)
    x = torch.zeros(64, 64, device="sim:0")
    for _ in range(2000):
        x.add_(1)
    assert x.sum().item() == 2000 * 64 * 64
    assert torch.sim.launch_count() >= 2000
    out_of_range = torch.full((1, 4), 99, device="sim:0")
    x.scatter_(0, out_of_range, torch.ones(1, 4, device="sim:0"))
    with pytest.raises(RuntimeError, match="queued earlier"):
        torch.accelerator.synchronize()
    x.add_(1)
    torch.accelerator.synchronize()


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
def test_a_throttled_link_takes_its_time(accelerators, direction: str) -> None:
    first, second = accelerators(2, **{f"{direction}_gbps": 0.1})
    ends = {"h2d": ("cpu", first), "d2h": (first, "cpu"), "d2d": (first, second)}
    source, target = (torch.zeros(5_000_000, dtype=torch.uint8, device=end) for end in ends[direction])
    slow = seconds(lambda: target.copy_(source))
    torch.accelerator.synchronize()
    assert slow >= 0.049  # 5 MB at 0.1 GB/s; how much longer is up to the machine
    statistics = torch.sim.link_stats(0)[direction]
    assert (statistics["bytes"], statistics["copies"]) == (5_000_000, 1)
    assert statistics["busy_s"] >= 0.049


def test_transfers_of_one_link_follow_each_other(accelerators) -> None:
    accelerators(1, h2d_gbps=0.1)
    source, target = torch.zeros(3_000_000, dtype=torch.uint8).pin_memory(), torch.empty(2, 3_000_000, dtype=torch.uint8, device="sim:0")
    streams = [torch.sim.Stream(0), torch.sim.Stream(0)]

    def both() -> None:
        for row, stream in zip(target, streams, strict=True):
            with stream:
                row.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    assert seconds(both) >= 0.059
