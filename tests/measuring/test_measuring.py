"""Measuring: every figure is there, nothing is left behind, and a device's own settings are found again."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigmodel.errors import MachineError
from bigmodel.measuring import links, measure_machine, timing
from bigmodel.measuring.disk import measure_disk
from bigmodel.measuring.links import measure_between, measure_link
from bigmodel.measuring.reference_block import HEAD_WIDTH, MODULES, ReferenceBlock, activation_width, inner_width
from bigmodel.measuring.timing import median_seconds


def test_a_machine_without_accelerators(quick: Path, tmp_path: Path):
    machine = measure_machine(tmp_path)
    assert set(machine.devices) == {"cpu"}
    cpu = machine.devices["cpu"]
    assert {(sample.dtype, sample.rows) for sample in cpu.matmul} >= {("float32", 1), ("float32", 4), ("bfloat16", 1)}
    assert not cpu.queues
    assert cpu.from_host is None
    assert machine.disk.source == "measured"
    assert machine.compute_threads == torch.get_num_threads()
    assert [file.name for file in tmp_path.iterdir()] == []


def test_accelerators_are_measured_with_their_links(quick: Path, accelerators):
    accelerators(2, memory="64MiB", h2d_gbps=0.5, h2d_latency_us=2000)
    machine = measure_machine()
    assert set(machine.devices) == {"cpu", 0, 1}
    link = machine.devices[0].from_host
    assert link is not None
    assert link.latency_seconds >= 2e-3
    assert machine.devices[1].to_host is not None
    assert machine.devices[0].name == "simulated accelerator 0"
    assert list(quick.iterdir()) == []  # the folder that it measured by default


class Copied(TorchDispatchMode):
    """Counts the bytes that are copied."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def test_the_rate_of_a_link_is_what_its_latency_leaves(accelerators, monkeypatch):
    """By a clock that the machine's load does not reach: a copy takes a millisecond, and a nanosecond a byte."""

    def seconds(work: Any, device: torch.device) -> float:
        with Copied() as copied:
            work()
        return 1e-3 + copied.nbytes / 1e9

    monkeypatch.setattr(links, "median_seconds", seconds)
    first, second = accelerators(2)
    small = links.SMALL_BYTES / 1e9
    for rate in (*measure_link(first), measure_between(first, second)):
        assert rate.latency_seconds == pytest.approx(1e-3 + small)
        nbytes = links.COPY_BYTES
        assert rate.seconds(nbytes) == pytest.approx(1e-3 + nbytes / 1e9)


def test_a_copy_takes_no_less_than_its_link_allows(accelerators):
    first, second = accelerators(2, h2d_gbps=1.0, d2d_gbps=1.0)
    nbytes = 8 << 20
    here, there = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8, device=first)
    elsewhere = torch.ones(nbytes, dtype=torch.uint8, device=second)
    for target, source, device in [(there, here.pin_memory(), first), (there, here, first), (elsewhere, there, second)]:
        # A busy machine is slower, none is faster.
        assert median_seconds(lambda target=target, source=source: target.copy_(source, non_blocking=True), device) > 0.95 * nbytes / 1e9


@pytest.mark.parametrize("queued", [False, True])
def test_a_device_whose_kernels_are_queued_is_recognized(quick: Path, accelerators, monkeypatch, queued: bool):
    monkeypatch.setattr("bigmodel.measuring.arithmetic.ACCELERATOR_SHAPE", (1024, 1024))
    monkeypatch.setattr("bigmodel.measuring.arithmetic.ROWS", (1, 512))
    accelerators(1, queued_kernels=queued)
    assert measure_machine().devices[0].queues is queued


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(MachineError, match="a_file"):
        measure_disk(tmp_path / "a_file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(MachineError, match="cannot be measured"):
        measure_disk(tmp_path)


def test_a_full_disk_is_said(quick: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("bigmodel.measuring.disk.shutil.disk_usage", lambda folder: type("", (), {"free": 1 << 20})())
    with pytest.raises(MachineError, match="64 MiB are free"):
        measure_disk(tmp_path)


def test_where_the_page_cache_cannot_be_emptied_the_disk_is_a_guess(quick: Path, tmp_path: Path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    disk, page_cache = measure_disk(tmp_path)
    assert (disk.source, page_cache.source) == ("guess", "measured")


def test_the_bar_is_full_at_the_end(quick: Path, tmp_path: Path, capfd):
    measure_machine(tmp_path, progress=True)
    assert "100%" in capfd.readouterr().err


def test_the_reference_block_has_the_shape_and_the_modules_that_it_tells():
    block = ReferenceBlock(3, 2 * HEAD_WIDTH, torch.ones(1))
    assert block(torch.ones(1, 3, 2 * HEAD_WIDTH)).shape == (1, 3, 2 * HEAD_WIDTH)
    assert len(list(block.modules())) == MODULES
    assert block.multiplying_seconds == 0
    multiplying = ReferenceBlock(3, 64, torch.ones(1), [torch.ones(inner_width(64), 64)] * 7)
    assert multiplying(torch.ones(1, 3, 64)).shape == (1, 3, 64)
    assert multiplying.multiplying_seconds > 0
    # Four square matrices, and three between 128 and 352.
    assert activation_width(128) == 4 * 256 + 3 * (128 + 352)


def test_the_median_is_of_single_runs(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    calls: list[int] = []
    # Five runs between two looks at a clock that a second passes on each time.
    assert median_seconds(lambda: calls.append(1), torch.device("cpu"), at_once=5) == 0.2
    assert len(calls) == 1 + 3 * 5
