"""The reader: every range, dtype and destination right, whatever the order, the number of threads and the size of the pieces."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, Concatenate, Reader, Slice, Source, Transpose, Whole
from bigmodel.loading.transfer import Transfer, lower
from bigmodel.progress import Progress

SHAPES = [(3,), (), (700, 1024), (0, 4), (1, 1), (513, 7), (64, 1025), (2048, 640)]


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"t{number}": torch.randn(shape) for number, shape in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def checkpoint(state: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    file = tmp_path_factory.mktemp("reader") / "x.safetensors"
    save_file(state, file)
    return Checkpoint.open(file)


def transfer(checkpoint: Checkpoint, source: str | Source, dtype: torch.dtype = torch.float32) -> Transfer:
    whole = Whole(source) if isinstance(source, str) else source
    return lower(whole, checkpoint.entries, str(source), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("destination_dtype", [None, torch.float32])
def test_all_at_once_in_any_dtype(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], dtype: torch.dtype, destination_dtype: torch.dtype | None
) -> None:
    jobs = [
        (transfer(checkpoint, name, dtype), torch.full(value.shape, torch.nan, dtype=destination_dtype or dtype))
        for name, value in state.items()
    ]
    with Progress(0, "test", show=False) as progress:
        count = Reader(checkpoint.identities).read(jobs[::-1], progress)
    assert count == progress.done_bytes == sum(value.nbytes for value in state.values())
    for each, tensor in jobs:
        # A destination of another dtype gets the values of the transfer's dtype, as a resident tensor would hold them.
        assert torch.equal(tensor, state[each.target].to(dtype).to(tensor.dtype))


def test_big_transposes_and_column_slices(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    cases: list[tuple[Source, torch.Tensor]] = [
        (Transpose(Whole("t7"), 0, 1), state["t7"].t()),
        (Slice(Whole("t7"), 1, 100, 3), state["t7"][:, 100:103]),
        (Slice(Whole("t2"), 1, 0, 1023), state["t2"][:, :1023]),
        (Concatenate((Slice(Whole("t7"), 1, 320, 320), Slice(Whole("t7"), 1, 0, 320)), 1), state["t7"].roll(320, 1)),
        (Concatenate((Whole("t7"), Whole("t7")), 1), torch.cat([state["t7"]] * 2, 1)),
    ]
    for source, expected in cases:
        for dtype in (torch.float32, torch.bfloat16):
            found = torch.full(expected.shape, torch.nan, dtype=dtype)
            Reader(checkpoint.identities).read([(transfer(checkpoint, source, dtype), found)])
            assert torch.equal(found, expected.to(dtype))


def test_onto_an_accelerator(checkpoint: Checkpoint, state: dict[str, torch.Tensor], execution_device: torch.device) -> None:
    for source, expected in [(Whole("t7"), state["t7"]), (Transpose(Whole("t7"), 0, 1), state["t7"].t()), (Whole("t1"), state["t1"])]:
        for dtype in (torch.float32, torch.bfloat16):
            found = torch.full(expected.shape, torch.nan, dtype=dtype, device=execution_device)
            Reader(checkpoint.identities).read([(transfer(checkpoint, source, dtype), found)])
            assert torch.equal(found.cpu(), expected.to(dtype))


def test_two_accelerators_and_the_host_at_once(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], accelerators: Callable[..., list[torch.device]]
) -> None:
    devices = [*accelerators(2, copy_delay_ms=3), torch.device("cpu")]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sources: list[Source] = [Whole("t7"), Transpose(Whole("t7"), 0, 1), Whole("t2"), Slice(Whole("t6"), 1, 3, 1000), Whole("t3")]
        expected = [state["t7"], state["t7"].t(), state["t2"], state["t6"][:, 3:1003], state["t3"]]
        for shift in range(3):
            jobs = [
                (transfer(checkpoint, source, dtype), torch.full(value.shape, torch.nan, dtype=dtype, device=devices[(n + shift) % 3]))
                for n, (source, value) in enumerate(zip(sources, expected, strict=True))
            ]
            Reader(checkpoint.identities).read(jobs)
            for (_, found), value in zip(jobs, expected, strict=True):
                assert torch.equal(found.cpu(), value.to(dtype))


def test_bytes_cross_the_link_in_the_narrower_dtype(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], accelerators: Callable[..., list[torch.device]]
) -> None:
    (device,) = accelerators(1)
    nbytes = state["t7"].nbytes
    for dtype, crossing_bytes in ((torch.float32, nbytes), (torch.float64, nbytes), (torch.bfloat16, nbytes // 2)):
        found = torch.empty(state["t7"].shape, dtype=dtype, device=device)
        before = torch.sim.link_stats(0)["h2d"]
        Reader(checkpoint.identities).read([(transfer(checkpoint, "t7", dtype), found)])
        after = torch.sim.link_stats(0)["h2d"]
        assert after["bytes"] - before["bytes"] == crossing_bytes
        if dtype != torch.bfloat16:  # what the host casts goes as it comes
            assert after["queued"] - before["queued"] == after["copies"] - before["copies"] > 0
        assert torch.equal(found.cpu(), state["t7"].to(dtype))


def test_an_accelerator_without_memory_to_pin(
    checkpoint: Checkpoint, state: dict[str, torch.Tensor], accelerators: Callable[..., list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (device,) = accelerators(1)
    real = torch.empty

    def refusing(*arguments: object, **named: object) -> torch.Tensor:
        if named.get("pin_memory"):
            raise RuntimeError("cannot pin")
        return real(*arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", refusing)
    found = real(state["t7"].shape, device=device)
    Reader(checkpoint.identities).read([(transfer(checkpoint, "t7"), found)])
    assert torch.equal(found.cpu(), state["t7"])


def test_into_views_and_inference_tensors(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    buffer = torch.full((700 * 1024 + 5,), torch.nan)
    Reader().read([(transfer(checkpoint, "t2"), buffer[5:].view(700, 1024))])
    assert torch.equal(buffer[5:].view(700, 1024), state["t2"])
    with torch.inference_mode():
        found = torch.empty(2048, 640, dtype=torch.bfloat16)
        Reader().read([(transfer(checkpoint, "t7", torch.bfloat16), found)])
    assert torch.equal(found, state["t7"].bfloat16())


def test_a_destination_of_another_shape_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Reader().read([(transfer(checkpoint, "t2"), torch.empty(1024, 700).t())])
    with pytest.raises(ValueError, match=r"\[700, 1024\]"):
        Reader().read([(transfer(checkpoint, "t2"), torch.empty(700 * 1024))])


def test_many_threads_share_a_reader(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    reader = Reader(checkpoint.identities)
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(5):
            found = torch.empty(state[name].shape)
            reader.read([(transfer(checkpoint, name), found)])
            if not torch.equal(found, state[name]):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("t7", "t2", "t6", "t0")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_number_of_threads_of_torch_is_left_alone(checkpoint: Checkpoint) -> None:
    before = torch.get_num_threads()
    Reader().read([(transfer(checkpoint, "t7", torch.bfloat16), torch.empty(2048, 640, dtype=torch.bfloat16))])
    assert torch.get_num_threads() == before
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_file_that_shrinks_or_changes_after_opening(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"t": torch.randn(1000, 1000)}, file)
    checkpoint = Checkpoint.open(file)
    stat = file.stat()
    reader = Reader(checkpoint.identities)
    found = torch.empty(1000, 1000)
    reader.read([(transfer(checkpoint, "t"), found)])
    os.truncate(file, 2_000_000)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: the file has changed.*2000000 now"):
        reader.read([(transfer(checkpoint, "t"), found)])
    # A reader that knows nothing of the file's size still notices its end, and does not die of it as a mapping would.
    with pytest.raises(CheckpointError, match="truncated"):
        Reader().read([(transfer(checkpoint, "t"), found)])
    os.truncate(file, stat.st_size)
    with pytest.raises(CheckpointError, match="was written to"):
        reader.read([(transfer(checkpoint, "t"), found)])


def test_what_was_read_does_not_alias_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    value = torch.randn(2000, 600)
    save_file({"t": value}, file)
    checkpoint = Checkpoint.open(file)
    found = torch.empty_like(value)
    Reader().read([(transfer(checkpoint, "t"), found)])
    with open(file, "r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert torch.equal(found, value)


def test_ctrl_c_ends_a_read_at_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Event()
    release = threading.Event()
    real = os.preadv

    def slow(*arguments: object) -> int:
        entered.set()
        release.wait(100)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", slow)

    def interrupt() -> None:
        entered.wait(100)
        os.kill(os.getpid(), signal.SIGINT)
        release.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    jobs = [(transfer(checkpoint, name), torch.empty(2048, 640)) for name in ["t7"] * 6]
    with pytest.raises(KeyboardInterrupt):
        Reader().read(jobs)
    thread.join()


def test_descriptors_are_closed_with_the_last_reader(checkpoint: Checkpoint) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    reader = Reader(checkpoint.identities)
    reader.read([(transfer(checkpoint, "t0"), torch.empty(3))])
    twin = copy.deepcopy(reader)
    del reader
    twin.read([(transfer(checkpoint, "t0"), torch.empty(3))])
    del twin
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
