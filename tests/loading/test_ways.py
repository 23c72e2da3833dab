"""Ways of reading: the same values through the page cache and past it, whatever a file system refuses; the choice is measured."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError, PlanError
from bigmodel.loading import Checkpoint, Reader, Slice, Source, Transpose, Whole, load, ways
from bigmodel.loading.page_cache import PageCache
from bigmodel.loading.ranges import plan_reads
from bigmodel.loading.transfer import Transfer, lower
from bigmodel.loading.ways import READINGS, Reading

needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct reads")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"odd": (3,), "big": (1000, 2999), "none": (0, 4), "wide": (700, 1024), "last": (513, 7)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(state: dict[str, torch.Tensor], tmp_path: Path) -> Checkpoint:
    save_file(state, tmp_path / "x.safetensors")
    return Checkpoint.open(tmp_path / "x.safetensors")


class Calls:
    """Counts reads of files by their way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.past_cache = self.buffered = 0
        real_preadv, real_open = os.preadv, os.open
        direct: set[int] = set()

        def open_file(path: str, flags: int, *rest: int) -> int:
            descriptor = real_open(path, flags, *rest)
            (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
            return descriptor

        def preadv(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if descriptor in direct:
                self.past_cache += 1
            else:
                self.buffered += 1
            return real_preadv(descriptor, buffers, offset, flags)

        monkeypatch.setattr(os, "open", open_file)
        monkeypatch.setattr(os, "preadv", preadv)


def drop(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def can_drop(checkpoint: Checkpoint) -> bool:
    """Whether the folder is on a disk: a file system in memory always has its files in memory."""
    drop(checkpoint)
    with open(checkpoint.files[0], "rb") as stream:
        return PageCache({checkpoint.files[0]: stream.fileno()}).share(checkpoint.files[0], 0, checkpoint.files[0].stat().st_size) < 0.5


def transfers(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> list[Transfer]:
    return [lower(Whole(name), checkpoint.entries, name, dtype) for name in checkpoint.entries]


def check_values(checkpoint: Checkpoint, state: dict[str, torch.Tensor], reading: Reading, dtype: torch.dtype = torch.float32) -> None:
    """Whole tensors, each byte once; then parts that are scattered in the file."""
    parts: list[tuple[Source, torch.Tensor]] = [
        (Transpose(Whole("big"), 0, 1), state["big"].t()),
        (Slice(Whole("wide"), 1, 100, 300), state["wide"][:, 100:400]),
        (Slice(Whole("last"), 0, 500, 13), state["last"][500:]),
    ]
    cases = [
        [(each, state[each.target]) for each in transfers(checkpoint, dtype)],
        [(lower(source, checkpoint.entries, str(source), dtype), value) for source, value in parts],
    ]
    for case in cases:
        jobs = [(each, torch.full(each.shape, torch.nan, dtype=dtype)) for each, _ in case]
        reader = Reader(checkpoint.identities, reading)
        reader.read(jobs)
        reader.close()
        for (_, found), (_, value) in zip(jobs, case, strict=True):
            assert torch.equal(found, value.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("is_cold", [False, True])
def test_every_way_gives_the_same_values(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], reading: Reading, dtype: torch.dtype, is_cold: bool
) -> None:
    if is_cold and hasattr(os, "posix_fadvise"):
        drop(checkpoint)
    check_values(checkpoint, state, reading, dtype)


def test_an_unknown_way_is_refused(checkpoint: Checkpoint) -> None:
    with torch.device("meta"):
        model = nn.ParameterDict({name: nn.Parameter(torch.empty(entry.shape)) for name, entry in checkpoint.entries.items()})
    with pytest.raises(PlanError, match=r"reading='quick'.*'auto', 'buffered', 'direct'"):
        load(model, checkpoint, reading="quick")  # type: ignore[arg-type]
    assert all(parameter.is_meta for parameter in model.parameters())


@needs_direct
@pytest.mark.parametrize("refusal", ["open", "read"])
@pytest.mark.parametrize("reading", ["auto", "direct"])
def test_a_file_system_that_refuses(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], reading: Reading, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(checkpoint)
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def open_file(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and refusal == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags & ~os.O_DIRECT, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def preadv(descriptor: int, *rest: object) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", preadv)
    check_values(checkpoint, state, reading)


@needs_direct
def test_a_system_that_cannot_say_what_is_cached(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageCache, "can_tell", False)
    drop(checkpoint)
    calls = Calls(monkeypatch)
    check_values(checkpoint, state, "auto")
    assert calls.past_cache == 0


def test_shares_of_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(10 * 4096 + 5))
    with open(file, "rb") as stream:
        cache = PageCache({file: stream.fileno()})
        assert cache.share(file, 4000, 5000) == 1.0
        os.fsync(stream.fileno())
        if cache.can_tell and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
            if cache.share(file, 0, file.stat().st_size) == 0.0:
                os.pread(stream.fileno(), 1, 4096)
                assert cache.share(file, 4096, 8192) == 0.5
                assert cache.share(file, 4095, 2) == 0.5
                assert cache.share(file, 8192, 4096) == 0.0


@needs_direct
def test_what_is_in_the_page_cache_comes_from_there(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.files[0].read_bytes()
    calls = Calls(monkeypatch)
    check_values(checkpoint, state, "auto")
    assert calls.past_cache == 0
    assert calls.buffered > 0


@needs_direct
@pytest.mark.parametrize("is_fast", [True, False])
def test_a_cold_file_is_read_past_the_cache_from_a_fast_disk_only(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_drop(checkpoint):
        pytest.skip("the temporary folder is in memory")
    monkeypatch.setattr(ways, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(ways, "FAST_BYTES_PER_SECOND", 0.0 if is_fast else float("inf"))
    calls = Calls(monkeypatch)
    entry = checkpoint.entries["big"]
    found = torch.empty(entry.shape, dtype=torch.bfloat16)  # staged, so many reads
    Reader(checkpoint.identities, "auto").read([(lower(Whole("big"), checkpoint.entries, "big", torch.bfloat16), found)])
    assert torch.equal(found, state["big"].bfloat16())
    assert calls.past_cache > 0
    assert (calls.buffered == 0) == is_fast


@needs_direct
@pytest.mark.parametrize("reading", ["auto", "direct"])
def test_a_file_of_which_the_beginning_is_in_the_page_cache(reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores begin; those beyond them leave what is in memory, and what is not is read all the same."""
    save_file({"x": torch.arange(6 << 20)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "x.safetensors")
    on_disk = can_drop(checkpoint)
    with open(checkpoint.files[0], "rb") as stream:
        stream.read(24 << 20)
    calls = Calls(monkeypatch)
    for dtype in (torch.int64, torch.float32):
        found = torch.empty(6 << 20, dtype=dtype)
        Reader(checkpoint.identities, reading).read([(lower(Whole("x"), checkpoint.entries, "x", dtype), found)], fresh=True)
        assert torch.equal(found, torch.arange(6 << 20).to(dtype))
    assert calls.past_cache > 0 or not on_disk
    assert calls.buffered > 0 or reading == "direct" or not on_disk


@needs_direct
def test_bytes_that_several_transfers_want_come_through_the_cache(checkpoint: Checkpoint) -> None:
    halves = [lower(Slice(Whole("wide"), 1, start, 512), checkpoint.entries, str(start), torch.bfloat16) for start in (0, 512)]
    plan = plan_reads([(half, torch.bfloat16, True) for half in halves])
    assert all(batch.read_again for batch in plan.batches)
    whole = lower(Whole("wide"), checkpoint.entries, "wide", torch.bfloat16)
    assert not any(batch.read_again for batch in plan_reads([(whole, torch.bfloat16, True)]).batches)


@needs_direct
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("reading", ["auto", "direct"])
def test_a_cast_of_tensors_that_begin_anywhere(
    state: dict[str, torch.Tensor], reading: Reading, shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a window's bytes can be seen as numbers they are cast from there, else from a copy; both come from past the cache."""
    file = tmp_path / "x.safetensors"
    save_file(state, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes((length + shift).to_bytes(8, "little") + content[8 : 8 + length] + b" " * shift + content[8 + length :])
    checkpoint = Checkpoint.open(file)
    drop(checkpoint)
    calls = Calls(monkeypatch)
    check_values(checkpoint, state, reading, torch.bfloat16)
    assert calls.past_cache > 0 or not can_drop(checkpoint)


@needs_direct
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reading", READINGS)
def test_the_end_of_a_truncated_file(checkpoint: Checkpoint, reading: Reading, dtype: torch.dtype) -> None:
    jobs = [(each, torch.empty(each.shape, dtype=dtype)) for each in transfers(checkpoint, dtype)]
    os.truncate(checkpoint.files[0], checkpoint.files[0].stat().st_size - 5000)
    drop(checkpoint)
    with pytest.raises(CheckpointError, match="truncated"):
        Reader(reading=reading).read(jobs)


@needs_direct
def test_a_file_that_another_one_replaces_between_two_openings(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    reader = Reader(checkpoint.identities, "direct")
    entry = checkpoint.entries["odd"]
    reader.read([(lower(Whole("odd"), checkpoint.entries, "odd", torch.float32), torch.empty(entry.shape))])
    save_file({name: -value for name, value in state.items()}, tmp_path / "new")
    os.replace(tmp_path / "new", checkpoint.files[0])
    found = torch.empty(state["big"].shape)
    reader.read([(lower(Whole("big"), checkpoint.entries, "big", torch.float32), found)])
    assert torch.equal(found, state["big"])
