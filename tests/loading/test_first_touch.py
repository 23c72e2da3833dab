"""Fresh memory: which kind of page is asked for follows from what each has cost, and only destinations are given memory."""

from __future__ import annotations

import itertools
import mmap
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.constants import MiB
from bigmodel.loading import Checkpoint, Reader, Transpose, Whole
from bigmodel.loading import first_touch as module
from bigmodel.loading.first_touch import BLOCK_BYTES, PATIENCE_BYTES, FirstTouch
from bigmodel.loading.transfer import lower

WARM, ORDINARY, COLD = 0.1, 0.7, 4.6
"""Costs of a block, as measured on a machine."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system takes no advice on pages")


def chosen(huge_costs: list[float], ordinary: float = ORDINARY) -> str:
    """What is chosen block after block while huge pages cost these: H for huge, o for ordinary."""
    kinds = module._Kinds()
    text = ""
    for cost in huge_costs:
        huge = kinds.choose(BLOCK_BYTES)
        kinds.tell(huge, BLOCK_BYTES, cost if huge else ordinary)
        text += "H" if huge else "o"
    return text


def test_huge_pages_stay_as_long_as_they_are_cheaper() -> None:
    assert chosen([WARM] * 50) == "o" + "H" * 49


def test_dear_huge_pages_are_tried_ever_more_rarely() -> None:
    waits = [len(run) for run in chosen([COLD] * 2000).split("H")[1:-1]]
    first = 2 * PATIENCE_BYTES // BLOCK_BYTES
    assert waits == [first << number for number in range(len(waits))]
    assert len(waits) >= 6


def test_huge_pages_that_have_become_cheap_are_found() -> None:
    found = chosen([COLD] * 3 + [WARM] * 97)
    assert found.endswith("H" * 80)


def test_pages_that_are_dear_of_either_kind_are_huge() -> None:
    assert chosen([COLD] * 20, ordinary=COLD + ORDINARY) == "o" + "H" * 19


def resident_bytes(address: int, nbytes: int) -> int:
    """How much of a range this process has memory for."""
    first, end = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as stream:
        stream.seek(first * 8)
        entries = memoryview(stream.read((end - first) * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def fresh(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


@needs_advice
def test_blocks_around_what_is_written_get_memory_and_nothing_outside_of_destinations() -> None:
    area = fresh(40 * MiB)
    odd = 3 * mmap.PAGESIZE  # a destination that begins and ends within blocks
    destination = area[odd : 32 * MiB + odd]
    touch = FirstTouch([destination])
    touch.prepare(destination[5 * MiB : 6 * MiB])
    assert MiB <= resident_bytes(area.data_ptr(), area.numel()) <= MiB + 2 * BLOCK_BYTES
    touch.prepare(destination)
    assert resident_bytes(destination.data_ptr(), destination.numel()) == destination.numel()
    assert resident_bytes(area.data_ptr(), area.numel()) == destination.numel()


@needs_advice
def test_neighbours_share_blocks_and_many_threads_ask_for_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    area = fresh(32 * MiB)
    parts = list(area.split(3 * MiB + 4096))
    populated: list[tuple[int, int]] = []
    monkeypatch.setattr(FirstTouch, "_populate", lambda self, start, end: populated.append((start, end)))
    touch = FirstTouch(parts[::-1])
    threads = [threading.Thread(target=lambda own=own: [touch.prepare(part) for part in own]) for own in (parts, parts[::-1], parts[3:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    populated.sort()
    assert populated[0][0] == area.data_ptr()
    assert populated[-1][1] == area.data_ptr() + area.numel()
    assert all(before[1] == after[0] for before, after in itertools.pairwise(populated))
    assert all(start % BLOCK_BYTES == 0 for start, _ in populated[1:])


@needs_advice
def test_what_is_there_already_is_kept() -> None:
    values = torch.arange(32 * MiB // 8)
    FirstTouch([values]).prepare(values)
    assert torch.equal(values, torch.arange(32 * MiB // 8))


@needs_advice
def test_a_kernel_that_does_not_know_the_advice_gives_ordinary_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POPULATE_WRITE", 99)
    area = fresh(32 * MiB)
    asked: list[int] = []
    real = FirstTouch._advise
    monkeypatch.setattr(
        FirstTouch, "_advise", lambda self, start, nbytes, advice: asked.append(advice) or real(self, start, nbytes, advice)
    )
    FirstTouch([area]).prepare(area)
    assert set(asked) == {99}
    assert resident_bytes(area.data_ptr(), area.numel()) == 0


def test_little_memory_and_other_memory_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstTouch, "_populate", lambda self, start, end: pytest.fail("it was small"))
    small, other = torch.empty(MiB, dtype=torch.uint8), torch.empty(64 * MiB, dtype=torch.uint8)
    FirstTouch([small]).prepare(small)
    monkeypatch.setattr(FirstTouch, "_populate", lambda self, start, end: pytest.fail("it is not a destination"))
    FirstTouch([other[: 32 * MiB]]).prepare(other[40 * MiB :])


@needs_advice
@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="the system has no huge pages")
def test_huge_pages_are_what_the_system_gives_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Kinds, "choose", lambda self, nbytes: True)
    area = fresh(64 * MiB)

    def huge_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))

    before = huge_bytes()
    FirstTouch([area]).prepare(area)
    # Where memory is in pieces, the system may have fewer to give than were asked for.
    assert huge_bytes() - before > 0
    assert resident_bytes(area.data_ptr(), area.numel()) == area.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_huge", [False, True])
def test_values_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_huge: bool) -> None:
    monkeypatch.setattr(module._Kinds, "choose", lambda self, nbytes: is_huge)
    torch.manual_seed(0)
    state = {f"t{number}": torch.randn(rows, 1024).bfloat16() for number, rows in enumerate([4096, 3, 3001, 0, 5000])}
    save_file(state, tmp_path / "x.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    sources = {name: (Transpose(Whole(name), 0, 1), value.t()) if name == "t2" else (Whole(name), value) for name, value in state.items()}
    jobs = [
        (lower(source, checkpoint.entries, name, dtype), torch.empty(expected.shape, dtype=dtype))
        for name, (source, expected) in sources.items()
    ]
    Reader(checkpoint.identities).read(jobs, fresh=True)
    for transfer, found in jobs:
        assert torch.equal(found, sources[transfer.target][1].to(dtype)), transfer.target
