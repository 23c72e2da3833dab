"""torch.accelerator and torch.sim on simulated devices: devices, streams, events, memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn


def test_current_device(accelerators) -> None:
    accelerators(2)
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("sim")
    assert torch.get_device_module("sim") is torch.sim
    accelerator.set_device_index(1)
    assert torch.empty(1, device="sim").device == torch.device("sim:1")
    assert torch.tensor([1.0]).to("sim").device == torch.device("sim:1")
    accelerator.set_device_index(0)
    with accelerator.device_index(1):
        assert torch.sim.current_device() == 1
    assert torch.sim.current_device() == 0
    with torch.sim.device(1):
        assert torch.zeros(1, device="sim").device.index == 1
    assert torch.tensor([1]).to(1).device == torch.device("sim:1")  # a plain integer is an accelerator's index
    with pytest.raises(RuntimeError, match="invalid device ordinal 2: there are 2 simulated devices"):
        torch.ones(1, device="sim:2")


def test_streams_and_events(accelerators) -> None:
    accelerators(1)
    accelerator = torch.accelerator
    default = torch.sim.default_stream(0)
    stream, first, second = torch.Stream(device="sim:0"), *(torch.Event(device="sim", enable_timing=True) for _ in range(2))
    assert accelerator.current_stream(0) == default
    with stream:
        assert accelerator.current_stream(0) == stream
    assert accelerator.current_stream(0) == default
    accelerator.set_stream(stream)
    assert accelerator.current_stream(0) == stream
    accelerator.set_stream(default)
    first.record(stream)
    second.record()
    second.synchronize()
    first.synchronize()
    assert first.query()
    assert first.elapsed_time(second) >= 0
    assert isinstance(torch.sim.Stream(0), torch.sim.Stream)
    assert isinstance(torch.sim.Event(), torch.sim.Event)


def test_memory_is_counted(accelerators) -> None:
    accelerators(1, memory="16MiB")
    allocated = torch.sim.memory_allocated
    whole = torch.empty(1 << 20, device="sim:0")
    assert allocated(0) == torch.accelerator.memory_allocated(0) == 4 << 20
    assert torch.accelerator.get_memory_info(0) == (12 << 20, 16 << 20)
    row = whole.view(1024, 1024)[3]
    del whole
    assert allocated(0) == 4 << 20  # a view keeps the storage
    del row
    assert allocated(0) == 0
    assert torch.sim.max_memory_allocated(0) == 4 << 20
    torch.sim.reset_peak_memory_stats(0)
    assert torch.sim.max_memory_allocated(0) == 0
    odd = torch.empty(1, device="sim:0")
    assert allocated(0) == 512  # charged in units
    made_by_the_kernel = torch.nonzero(torch.ones(1000, device="sim:0"))
    assert allocated(0) == 512 + 8192
    del odd, made_by_the_kernel
    assert allocated(0) == 0


def test_capacity_is_hard(accelerators) -> None:
    accelerators(2, memory=["1MiB", "2MiB"])
    with pytest.raises(torch.OutOfMemoryError, match="Device 0 has a total capacity"):
        torch.empty(1 << 20, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 20).to("sim:1")
    x = torch.zeros(100 * 1024, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        x + x + x + x
    with pytest.raises(torch.OutOfMemoryError):
        torch.nonzero(torch.ones(100 * 1024, dtype=torch.bool, device="sim:0"))  # memory that the kernel itself allocates
    del x
    with pytest.raises(torch.OutOfMemoryError):
        nn.Linear(600, 600).to("sim:0")
    assert torch.sim.memory_allocated(0) == 0
    torch.empty(1 << 18, device="sim:1")


def test_poison_shows_what_nobody_wrote(accelerators) -> None:
    accelerators(1)
    assert torch.empty(4, device="sim:0").isnan().all()
    assert torch.empty(4, device="sim:0", dtype=torch.int64).tolist() == [-1] * 4


def test_random_numbers_come_from_the_devices_own_generators(accelerators) -> None:
    accelerators(2)
    torch.manual_seed(0)
    first, second = torch.randn(5, device="sim:0"), torch.randn(5, device="sim:0")
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(5, device="sim:0"))
    assert not torch.equal(first, second)
    state = torch.sim.get_rng_state(0)
    third = torch.rand(3, device="sim:0")
    torch.sim.set_rng_state(state, 0)
    assert torch.equal(third, torch.rand(3, device="sim:0"))
    generator = torch.Generator(device="sim:0").manual_seed(1)
    own = torch.randn(3, device="sim:0", generator=generator)
    assert torch.equal(own, torch.randn(3, device="sim:0", generator=generator.manual_seed(1)))
    torch.manual_seed(0)
    on_cpu = torch.randn(5)
    torch.manual_seed(0)
    torch.randn(100, device="sim:0")
    assert torch.equal(on_cpu, torch.randn(5))
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.randn(4, device="sim:0")


def test_threads_have_their_own_current_device(accelerators) -> None:
    accelerators(2)
    errors = []

    def count_to_200(index: int) -> None:
        try:
            with torch.sim.device(index):
                x = torch.zeros(100, device="sim")
                for _ in range(200):
                    x = x + 1
                assert x.device.index == index
                assert x.sum().item() == 20000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=count_to_200, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
