"""Files of torch.save, and of torch.distributed.checkpoint, that lie elsewhere: found by a few ranges, streamed into place."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from range_server import Answer, RangeServer
from torch import nn

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.loading import Checkpoint, Reader, Whole, load, ranges
from bigmodel.loading.formats import torch_zip
from bigmodel.loading.remote import headers, http, reader, retry
from bigmodel.loading.transfer import lower


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(retry, "LONGEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(reader, "SHORTEST_REQUEST_BYTES", 4096)
    monkeypatch.setattr(ranges, "DIRECT_BYTES", 4096)
    monkeypatch.setattr(http, "_routes", {})  # ports come again
    # So that a small file has parts that are not asked for.
    monkeypatch.setattr(headers, "FIRST_BYTES", 1024)
    monkeypatch.setattr(torch_zip, "END_BYTES", 2048)


def states() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        {"0.weight": random(64, 480), "0.bias": random(64)},
        {"1.weight": random(320, 64).bfloat16(), "1.bias": random(320).bfloat16()},
    ]


def whole() -> dict[str, torch.Tensor]:
    return states()[0] | states()[1]


def saved(content: object, *, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def sharded() -> dict[str, bytes]:
    shards = {f"pytorch_model-0000{number + 1}-of-00002.bin": state for number, state in enumerate(states())}
    weight_map = {name: file for file, state in shards.items() for name in state}
    return {file: saved(state) for file, state in shards.items()} | {
        "pytorch_model.bin.index.json": json.dumps({"weight_map": weight_map}).encode()
    }


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(480, 64, dtype=dtype), nn.Linear(64, 320, dtype=dtype))


def is_filled(filled: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    state = filled.state_dict()
    return all(torch.equal(state[name], value.to(dtype)) for name, value in whole().items())


def fetched_bytes(server: RangeServer) -> int:
    return sum(
        min(end, len(server.files[path])) - start
        for path, start, end in server.requests
        if end is not None and path in server.files and ".json" not in path
    )


@pytest.fixture
def server() -> Iterator[RangeServer]:
    files = {f"sharded/{name}": data for name, data in sharded().items()}
    with RangeServer(files | {"one/pytorch_model.bin": saved(whole()), "one/other.pt": saved(whole())}) as running:
        yield running


@pytest.mark.parametrize("where", ["sharded", "sharded/pytorch_model.bin.index.json", "one", "one/other.pt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contents_come_by_a_few_ranges_and_weights_are_streamed_into_place(server: RangeServer, where: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(server.url(where))
    assert checkpoint.format == "torch"
    assert {name: (entry.shape, entry.dtype) for name, entry in checkpoint.entries.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in whole().items()
    }
    files = 2 if where.startswith("sharded") else 1
    opening_bytes = fetched_bytes(server)
    assert opening_bytes <= files * (1024 + 2048 + 1024)  # its start, its end, and the rest of its pickle
    filled = model(dtype)
    load(filled, checkpoint)
    assert is_filled(filled, dtype)
    weights_bytes = sum(value.nbytes for value in whole().values())
    assert weights_bytes <= fetched_bytes(server) - opening_bytes <= weights_bytes + files * 2048


def test_offsets_are_those_of_torch(server: RangeServer) -> None:
    for entry in Checkpoint.open(server.url("one")).entries.values():
        data = server.files["one/pytorch_model.bin"][entry.offset : entry.offset + entry.nbytes]
        assert data == whole()[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_views_and_shared_storages(server: RangeServer) -> None:
    base = torch.arange(6000.0).view(60, 100)
    state = {"whole": base, "row": base[2], "columns": base[:, 3:5], "turned": base.t(), "some": base[::2, ::3], "empty": torch.empty(0, 3)}
    server.files["views.pt"] = saved(state)
    checkpoint = Checkpoint.open(server.url("views.pt"))
    entries = checkpoint.entries
    jobs = [(lower(Whole(name), entries, name, torch.float32), torch.empty(value.shape)) for name, value in state.items()]
    Reader(checkpoint.identities).read(jobs)
    for transfer, tensor in jobs:
        assert torch.equal(tensor, state[transfer.target]), transfer.target


def test_what_stays_on_disk_is_fetched_when_it_is_read(server: RangeServer) -> None:
    report = load(model(), Checkpoint.open(server.url("sharded")), {"0": "cpu", "1": "disk"})
    assert report.store is not None
    rows = torch.empty(2, 64)
    report.store.read_rows("1.weight", torch.tensor([5, 300]), rows)
    assert torch.equal(rows, whole()["1.weight"].float()[[5, 300]])


def cuts(answer: Answer) -> None:
    answer.cut = max(1, len(answer.body) // 2)


def short_answers(answer: Answer) -> None:
    if answer.status == 206 and len(answer.body) > 10:
        total = answer.headers["Content-Range"].partition("/")[2]
        answer.body = answer.body[: len(answer.body) * 2 // 3]
        answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.start + len(answer.body) - 1}/{total}"


def without_ranges(server: RangeServer) -> Callable[[Answer], None]:
    def fault(answer: Answer) -> None:
        if answer.status == 206:
            answer.status, answer.body = 200, server.files[answer.path]
            del answer.headers["Content-Range"]

    return fault


@pytest.mark.parametrize("fault", [cuts, short_answers])
def test_servers_that_misbehave_but_send_it_in_the_end(server: RangeServer, fault: Callable[[Answer], None]) -> None:
    server.fault = fault
    filled = model()
    load(filled, Checkpoint.open(server.url("sharded")))
    assert is_filled(filled)


def test_a_server_without_ranges_sends_small_files_whole_and_large_ones_are_refused(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.fault = without_ranges(server)
    filled = model()
    load(filled, Checkpoint.open(server.url("one")))
    assert is_filled(filled)
    monkeypatch.setattr(headers, "LONGEST_SKIP_BYTES", 10_000)
    with pytest.raises(CheckpointError, match=r"other\.pt: its table of contents is at byte \d+, and its server sends whole files alone"):
        Checkpoint.open(server.url("one/other.pt"))


def test_a_file_that_changes_between_two_requests_is_refused(server: RangeServer) -> None:
    def changed(answer: Answer) -> None:
        if answer.start > 0:
            answer.headers["ETag"] = '"other"'

    server.fault = changed
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        Checkpoint.open(server.url("one"))


class Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("was-run",)


def test_what_is_no_archive_of_tensors_is_refused_by_name(server: RangeServer) -> None:
    good = server.files["one/pytorch_model.bin"]
    for name, data, says in [
        ("cut.bin", good[:-40], "truncated or damaged: no archive directory"),
        ("half.bin", good[: len(good) // 2], "truncated or damaged: no archive directory"),
        ("holed.bin", good[:5000] + good[9000:], "truncated|damaged"),
        ("empty.bin", b"", "bytes|empty|answered"),
        ("code.bin", saved({"a": torch.ones(2), "b": Code()}), "foreign code"),
        ("old.bin", saved(whole(), legacy=True), "not an archive of torch 1.6 or later.*download it and convert it once"),
        ("page.bin", b"<!doctype html><html></html>", "a web page"),
    ]:
        server.files[name] = data
        with pytest.raises(CheckpointError, match=says) as error:
            Checkpoint.open(server.url(name))
        assert name in str(error.value)
    assert not os.path.exists("was-run")


def test_any_url_of_fsspec(tmp_path: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for name, data in sharded().items():
        system.pipe_file(f"/torch-bucket/{name}", data)
    try:
        filled = model()
        load(filled, Checkpoint.open("memory://torch-bucket"))
        assert is_filled(filled)
        for name, data in distributed(tmp_path / "saved", whole()).items():
            system.pipe_file(f"/torch-bucket/folder/{name}", data)
        filled = model()
        load(filled, Checkpoint.open("memory://torch-bucket/folder"))
        assert is_filled(filled)
    finally:
        system.rm("/torch-bucket", recursive=True)


def distributed(folder: Path, content: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The files of a distributed checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=str(folder), no_dist=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("where", ["folder", "folder/.metadata"])
def test_a_distributed_checkpoint_streams_as_well(server: RangeServer, tmp_path: Path, where: str) -> None:
    large = {"large": torch.randn(40_000), "more": torch.randn(200, 300)}
    files = distributed(tmp_path / "saved", whole() | large)
    server.files |= {f"folder/{name}": data for name, data in files.items()}
    checkpoint = Checkpoint.open(server.url(where))
    local = Checkpoint.open(tmp_path / "saved")
    assert checkpoint.format == "torch.distributed"
    assert checkpoint.total_bytes == local.total_bytes
    assert {file.name for file in checkpoint.files} == {".metadata", "__0_0.distcp"}
    assert set(checkpoint.identities) == set(checkpoint.files)
    opening_bytes = fetched_bytes(server)
    edges = 2 * 4096 + 8192
    assert opening_bytes < len(files[".metadata"]) + edges * len(whole() | large) + 2000
    filled = model()
    load(filled, checkpoint, ignore_unexpected=list(large))
    assert is_filled(filled)
    assert fetched_bytes(server) - opening_bytes <= sum(value.nbytes for value in whole().values()) + 20_000
    report = load(model(), checkpoint, {"": "disk"}, ignore_unexpected=list(large))
    assert report.store is not None
    row = torch.empty(1, 64)
    report.store.read_rows("1.weight", torch.tensor([7]), row)
    assert torch.equal(row[0], whole()["1.weight"].float()[7])


def test_what_is_wrong_with_a_distributed_checkpoint_is_said_by_name(server: RangeServer, tmp_path: Path) -> None:
    files = distributed(tmp_path / "saved", whole())
    server.files["lost/.metadata"] = files[".metadata"]
    with pytest.raises(CheckpointNotFoundError, match=r"lost/\.metadata: says that .* lies in '__0_0\.distcp', which cannot be opened"):
        Checkpoint.open(server.url("lost"))
    server.files |= {"cut/.metadata": files[".metadata"], "cut/__0_0.distcp": files["__0_0.distcp"][:-50]}
    with pytest.raises(CheckpointError, match=r"cut/__0_0\.distcp: truncated: expected at least \d+ bytes"):
        Checkpoint.open(server.url("cut"))
    server.files |= {"other/.metadata": files[".metadata"], "other/__0_0.distcp": bytes(len(files["__0_0.distcp"]))}
    with pytest.raises(CheckpointError, match=r"other/__0_0\.distcp: damaged: no tensor at byte 0"):
        Checkpoint.open(server.url("other"))
    server.fault = without_ranges(server)
    server.files |= {f"whole/{name}": data for name, data in files.items()}
    filled = model()
    load(filled, Checkpoint.open(server.url("whole/.metadata")))
    assert is_filled(filled)


def with_contents(pickled: bytes) -> bytes:
    """An archive of torch.save with another pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(whole()))) as archive, zipfile.ZipFile(stream, "w") as changed:
        for info in archive.infolist():
            changed.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else archive.read(info))
    return stream.getvalue()


REPEATING = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60
"""A tuple of twice the same tuple of twice the same tuple … in the memo."""


@pytest.mark.parametrize("use", [b"}%bNs.", b"ccollections\nOrderedDict\n]%bN\x86a\x85R."])
@pytest.mark.parametrize(
    ("before", "key", "says"),
    [(b"", b")" + b"\x85" * 100_000, "more than 100 tuples within each other"), (REPEATING, b"h\x00", "tuples repeat each other")],
)
def test_tuples_that_take_for_ever_to_hash_are_refused(server: RangeServer, use: bytes, before: bytes, key: bytes, says: str) -> None:
    server.files["x.pt"] = with_contents(b"\x80\x02" + before + use % key)
    with pytest.raises(CheckpointError, match=f"x.pt: holds more than tensors and plain containers.*{says}"):
        Checkpoint.open(server.url("x.pt"))


def test_tuples_that_are_saved_beside_tensors_are_no_harm(server: RangeServer) -> None:
    names = tuple(str(number) for number in range(10_000))
    server.files["x.pt"] = saved(whole() | {"names": [names, (names, (names, 1.0)), {("a", (1, 2)): names}]})
    assert set(Checkpoint.open(server.url("x.pt")).entries) == set(whole())
