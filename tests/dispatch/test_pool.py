"""What passes through a device: prefetch, the bounded ring, counters, and what happens when memory is short."""

from __future__ import annotations

import copy
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_models import FileStore, tiny
from torch import nn

from bigmodel.dispatch import dispatch, dispatched, placement

CPU = torch.device("cpu")
TWO_GROUPS = 2 * (32 * 32 * 4 + 32 * 4)
"""Bytes of two layers of `chain` with its default width."""


def chain(depth: int, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).eval()


def on_disk(model: nn.Module, folder: Path, device: torch.device, **arguments: Any) -> FileStore:
    store = FileStore(folder, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=device, store=store, **arguments)
    return store


@torch.no_grad()
def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.fixture
def small_groups_too(monkeypatch):
    """Prefetches tiny groups on CPU as well."""
    import bigmodel.dispatch.schedule as schedule

    monkeypatch.setattr(schedule, "_AHEAD_BYTES", 0)


def test_the_second_forward_finds_everything_on_its_way(tmp_path, execution_device, small_groups_too):
    model = chain(6)
    x = torch.randn(2, 32)
    expected = run(model, x)
    on_disk(model, tmp_path, execution_device, ring_bytes=TWO_GROUPS)
    run(model, x)
    before = {row.name: row.counters.hits for row in placement(model).rows if row.counters is not None}
    assert torch.equal(run(model, x), expected)
    after = {row.name: row.counters.hits for row in placement(model).rows if row.counters is not None}
    # Nobody knew yet that the first group would follow the last one.
    assert sum(after.values()) - sum(before.values()) == 5
    assert torch.equal(run(model, x), expected)
    assert sum(row.counters.hits for row in placement(model).rows) - sum(after.values()) == 6


def test_no_prefetch(tmp_path, execution_device, small_groups_too):
    model = chain(6)
    x = torch.randn(2, 32)
    expected = run(model, x)
    store = on_disk(model, tmp_path, execution_device, prefetch=False, ring_bytes=TWO_GROUPS)
    for _ in range(3):
        assert torch.equal(run(model, x), expected)
    assert all(row.counters.hits == 0 for row in placement(model).rows)
    assert len(store.reads) == 3 * 12


def test_another_way_through_the_model(tmp_path, execution_device, small_groups_too):
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for index in order:
                x = self.layers[index](x)
            return x

    torch.manual_seed(0)
    model = Branching()
    plain = copy.deepcopy(model)
    on_disk(model, tmp_path, execution_device)
    x = torch.randn(2, 8)
    orders = [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
        [5, 3, 1],
        [5, 3, 1],
        [0, 0, 0],
        [2],
        [1, 2, 1, 3, 1, 2, 1, 3],
        [0, 1, 2, 3, 4, 5],
        [],
    ]
    for order in orders * 2:
        with torch.no_grad():
            assert torch.equal(model(x, order), plain(x, order))


def test_ring_is_bounded(tmp_path, accelerators, small_groups_too):
    (device,) = accelerators(1, memory="64MiB")
    model = chain(8, 256)
    group = 256 * 256 * 4 + 256 * 4
    x = torch.randn(2, 256)
    expected = run(model, x)
    on_disk(model, tmp_path, device)
    run(model, x)
    torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(3):
        assert torch.equal(run(model, x), expected)
    assert 2 * group <= torch.accelerator.max_memory_allocated(device) <= 2 * group + 64 * 1024
    assert placement(model).pool_bytes == {str(device): 2 * group}


@pytest.mark.parametrize("groups", [0.5, 1, 1.5, 3, 100])
def test_any_ring_size_is_right(tmp_path, execution_device, small_groups_too, groups):
    model, ids, expected = tiny()
    block = sum(-(-p.numel() * 4 // 64) * 64 for p in model.layers[0].parameters())
    on_disk(model, tmp_path, execution_device, ring_bytes=int(groups * block))
    for _ in range(4):
        assert torch.equal(run(model, ids), expected)


def test_tiny_groups_on_cpu_are_read_once(tmp_path):
    model = chain(20)
    x = torch.randn(2, 32)
    expected = run(model, x)
    store = on_disk(model, tmp_path, CPU)
    for _ in range(3):
        assert torch.equal(run(model, x), expected)
    assert len(store.reads) == 40


def test_a_ring_that_holds_all_groups_reads_them_once(tmp_path, execution_device):
    model = chain(4)
    x = torch.randn(2, 32)
    store = on_disk(model, tmp_path, execution_device, ring_bytes=1 << 20)
    for _ in range(3):
        run(model, x)
    assert len(store.reads) == 8


def test_the_next_layer_is_read_while_one_computes_on_the_cpu(tmp_path, small_groups_too):
    changed, counts = threading.Condition(), {"reads": 0, "calls": 0}
    overlapped: list[bool] = []

    class Counted(FileStore):
        def read_into(self, reads: Any) -> None:
            with changed:
                counts["reads"] += 1
                changed.notify_all()
            super().read_into(reads)

    class Work(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with changed:
                counts["calls"] += 1
                if counts["calls"] > 20:  # what comes next is known after two forwards
                    overlapped.append(changed.wait_for(lambda: counts["reads"] > counts["calls"], timeout=30))
            return self.linear(x)

    model = nn.Module()
    model.layers = nn.ModuleList([Work() for _ in range(10)])
    store = Counted(tmp_path, dict(model.state_dict()))
    dispatch(model, {"": "disk"}, main_device=CPU, store=store, ring_bytes=1000)
    x = torch.randn(1, 8)
    with torch.no_grad():
        for _ in range(3):
            for layer in model.layers:
                layer(x)
    assert overlapped == [True] * 10


def test_late_copies_are_waited_for_on_the_device(tmp_path, accelerators):
    (device,) = accelerators(1, copy_delay_ms=5, queued_kernels=True)
    model, ids, expected = tiny()
    on_disk(model, tmp_path, device)
    for _ in range(3):
        assert torch.equal(run(model, ids), expected)


def test_threads_need_more_than_the_ring(tmp_path, execution_device, small_groups_too):
    model = chain(5)
    inputs = [torch.randn(2, 32) for _ in range(4)]
    expected = [run(model, x) for x in inputs]
    on_disk(model, tmp_path, execution_device, ring_bytes=5000)
    wrong: list[Any] = []

    def work(index: int) -> None:
        try:
            for _ in range(15):
                if not torch.equal(run(model, inputs[index]), expected[index]):
                    wrong.append(index)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_device_that_is_too_small_tells_so_and_recovers(tmp_path, accelerators):
    (device,) = accelerators(1, memory="1MiB")
    model = chain(4, 256)
    x = torch.randn(2, 256)
    expected = run(model, x)
    on_disk(model, tmp_path, device)
    filler = torch.empty(900 * 1024, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, x)
    del filler
    for _ in range(2):
        assert torch.equal(run(model, x), expected)


def test_values_written_while_fetched_ahead_are_seen(tmp_path, execution_device, small_groups_too):
    model = chain(4)
    x = torch.randn(2, 32)
    on_disk(model, tmp_path, execution_device)
    for _ in range(3):
        run(model, x)
    with torch.no_grad():
        for layer in model:  # the first one is on its way at this moment
            layer.weight.zero_()
            layer.bias.zero_()
    assert float(run(model, x).abs().sum()) == 0


def test_learned_order_is_forgotten_with_the_model(tmp_path):
    model = chain(4)
    on_disk(model, tmp_path, CPU)
    run(model, torch.randn(2, 32))
    state = dispatched(model)
    assert state is not None
    assert len(state.schedule.groups) == 4


def test_device_without_streams(tmp_path, accelerators, monkeypatch):
    import bigmodel.dispatch.buffers as buffers
    import bigmodel.dispatch.pool as pool

    for module in (pool, buffers):
        monkeypatch.setattr(module, "has_streams", lambda device: False)
    (device,) = accelerators(1)
    model, ids, expected = tiny()
    on_disk(model, tmp_path, device)
    for _ in range(3):
        assert torch.equal(run(model, ids), expected)


class StuckStore(FileStore):
    """Reads nothing while `gate` is closed."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(folder, tensors)
        self.gate = threading.Event()
        self.waiting = threading.Event()

    def read_into(self, reads: Any) -> None:
        self.waiting.set()
        assert self.gate.wait(100)
        super().read_into(reads)


def test_ctrl_c_ends_a_forward_that_waits_for_weights(tmp_path, accelerators):
    model = chain(4)
    x = torch.randn(2, 32)
    expected = run(model, x)
    store = StuckStore(tmp_path, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=accelerators(1)[0], store=store, ring_bytes=TWO_GROUPS)

    def interrupt() -> None:
        assert store.waiting.wait(100)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(model, x)
    assert not store.gate.is_set()
    thread.join()
    store.gate.set()
    assert torch.allclose(run(model, x), expected)
