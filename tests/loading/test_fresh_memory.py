"""Memory that is written for the first time: huge pages where they are cheap, many ordinary ones in one go, and the same values."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.constants import MiB
from bigmodel.loading import Checkpoint, Reader, Transpose, Whole, fresh_memory
from bigmodel.loading.fresh_memory import LEAST_BYTES, ask_for_huge_pages, memory_in_one_piece, take_pages
from bigmodel.loading.transfer import lower

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    not fresh_memory.BLOCK_SIZE.exists() or "[never]" in HUGE_PAGES.read_text(), reason="needs a system with huge pages"
)


def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, block: str | None, reported: str | None) -> None:
    """What the system says of itself; None where it says nothing."""
    for name, text in (("BLOCK_SIZE", block), ("REPORTED_ORDER", reported)):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(fresh_memory, name, file)


PAGES_PER_BLOCK = (2 * MiB // mmap.PAGESIZE).bit_length() - 1
"""As an exponent of two."""


@pytest.mark.parametrize(
    ("block", "reported", "expected"),
    [
        ("2097152\n", "4294967295\n", 2 * MiB),  # nobody asks for reports
        ("2097152\n", "11\n", 2 * MiB),  # older kernels say so with an order that no block has
        ("2097152\n", None, 2 * MiB),  # a kernel that cannot report
        ("2097152\n", f"{PAGES_PER_BLOCK}\n", 0),
        ("2097152\n", "0\n", 0),
        ("2097152\n", f"{PAGES_PER_BLOCK + 1}\n", 2 * MiB),  # only bigger blocks are taken
        (None, None, 0),
        ("", "x", 0),
    ],
)
def test_the_system_says_whether_they_are_cheap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: str | None, reported: str | None, expected: int
) -> None:
    system(monkeypatch, tmp_path, block=block, reported=reported)
    assert fresh_memory._cheap_block_bytes() == expected


def fresh(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def huge_bytes(tensor: torch.Tensor) -> int:
    """How much of the memory areas that a tensor lies in is huge pages."""
    total, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            within = start < tensor.data_ptr() + tensor.nbytes and end > tensor.data_ptr()
        elif within and words[0] == "AnonHugePages:":
            total += int(words[1]) << 10
    return total


def advice(tensor: torch.Tensor) -> list[str]:
    """What the system was told of the area that a tensor lies in."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            within = start <= tensor.data_ptr() < end
        elif within and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("the system does not know this memory")


def resident_bytes(tensor: torch.Tensor) -> int:
    first, end = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as stream:
        stream.seek(first * 8)
        entries = memoryview(stream.read((end - first) * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


@needs_huge_pages
def test_only_what_lies_within_a_destination_becomes_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "_cheap_block_bytes", lambda: fresh_memory._number(fresh_memory.BLOCK_SIZE))
    area = fresh(40 * MiB)
    odd = 3 * mmap.PAGESIZE  # a destination that begins and ends within blocks
    destination = area[odd : 32 * MiB + odd]
    ask_for_huge_pages([destination])
    assert resident_bytes(area) == 0
    destination.fill_(7)
    assert resident_bytes(area) == destination.nbytes
    # Where memory is in pieces, the system may have fewer to give than were asked for.
    assert 0 < huge_bytes(destination) <= destination.nbytes
    assert bool((destination == 7).all())


@needs_huge_pages
def test_a_disk_is_given_memory_in_one_piece() -> None:
    memory = memory_in_one_piece(4 * MiB)
    assert memory.shape == (4 * MiB,)
    assert not memory.any()
    assert memory.data_ptr() % int(fresh_memory.BLOCK_SIZE.read_text()) == 0
    assert "hg" in advice(memory)


def test_a_system_without_huge_pages_gives_memory_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system(monkeypatch, tmp_path, block=None, reported=None)
    memory = memory_in_one_piece(1 * MiB)
    assert memory.shape == (1 * MiB,)
    assert not memory.any()
    assert memory.data_ptr() % mmap.PAGESIZE == 0


@needs_huge_pages
def test_where_the_host_takes_blocks_back_pages_are_ordinary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system(monkeypatch, tmp_path, block="2097152", reported=str(PAGES_PER_BLOCK))
    area = fresh(32 * MiB)
    ask_for_huge_pages([area])
    area.fill_(7)
    assert "[always]" in HUGE_PAGES.read_text() or huge_bytes(area) == 0


def test_what_is_small_elsewhere_or_already_there_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "_cheap_block_bytes", lambda: 2 * MiB)
    values = torch.arange(32 * MiB // 8)
    ask_for_huge_pages([values, torch.empty(3), torch.empty(0), torch.empty(64 * MiB, device="meta")])
    assert torch.equal(values, torch.arange(32 * MiB // 8))


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs Linux 5.14")
def test_pages_are_given_in_one_go_and_hold_what_they_held() -> None:
    area = fresh(8 * MiB).view(torch.int16)
    area[1000] = 7
    take_pages(area, 1000, 2 * MiB)
    # Neighbours on the same pages come with it.
    assert resident_bytes(area) >= -(-(2000 + 4 * MiB) // mmap.PAGESIZE) * mmap.PAGESIZE
    assert (int(area[1000]), int(area.sum())) == (7, 7)
    untouched = fresh(8 * MiB)
    for count in (0, 1, LEAST_BYTES - 1):
        take_pages(untouched, 0, count)
    assert resident_bytes(untouched) == 0


def test_a_system_that_does_not_know_the_question_gives_pages_at_their_touch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_file({"x": torch.arange(4 * MiB)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for answer in (lambda *_: -1, None):
        monkeypatch.setattr(fresh_memory, "_madvise", answer)
        found = torch.empty(4 * MiB, dtype=torch.int64)
        Reader(checkpoint.identities).read([(lower(Whole("x"), checkpoint.entries, "x", torch.int64), found)], fresh=True)
        assert torch.equal(found, torch.arange(4 * MiB))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_huge", [False, True])
def test_values_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_huge: bool) -> None:
    monkeypatch.setattr(fresh_memory, "_cheap_block_bytes", lambda: 2 * MiB if is_huge else 0)
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
