"""Checkpoints on web servers and in object stores, on servers that misbehave too: headers by ranges, weights streamed into place."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from range_server import Answer, RangeServer
from safetensors.torch import save
from torch import nn

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.loading import Checkpoint, LoadReport, Reader, load, ranges
from bigmodel.loading.keys import Whole
from bigmodel.loading.location import HubRepository, RemoteFile, located
from bigmodel.loading.remote import beside as remote_beside
from bigmodel.loading.remote import http, reader, retry
from bigmodel.loading.transfer import lower


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(retry, "LONGEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(reader, "SHORTEST_REQUEST_BYTES", 4096)
    monkeypatch.setattr(ranges, "DIRECT_BYTES", 4096)
    monkeypatch.setattr(http, "_routes", {})  # ports come again


def states() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        {f"0.{name}": value for name, value in {"weight": random(64, 48), "bias": random(64)}.items()},
        {f"1.{name}": value for name, value in {"weight": random(320, 64).bfloat16(), "bias": random(320).bfloat16()}.items()},
    ]


def whole() -> dict[str, torch.Tensor]:
    return states()[0] | states()[1]


def sharded_files() -> dict[str, bytes]:
    shards = {f"model-0000{number + 1}-of-00002.safetensors": state for number, state in enumerate(states())}
    weight_map = {name: file for file, state in shards.items() for name in state}
    files = {file: save(state, metadata={"format": "pt"}) for file, state in shards.items()}
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(48, 64, dtype=dtype), nn.Linear(64, 320, dtype=dtype))


def is_filled(filled: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    state = filled.state_dict()
    return all(torch.equal(state[name], value.to(dtype)) for name, value in whole().items())


def loaded(where: str, **arguments: object) -> tuple[nn.Module, LoadReport]:
    empty = model()
    return empty, load(empty, Checkpoint.open(where), **arguments)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[RangeServer]:
    sharded = {f"sharded/{name}": data for name, data in sharded_files().items()}
    with RangeServer(sharded | {"one/model.safetensors": save(whole()), "folder/.metadata": b"x"}) as running:
        yield running


@pytest.mark.parametrize(
    ("where", "meaning"),
    [
        ("owner/name", HubRepository("owner/name")),
        ("owner/name@v1", HubRepository("owner/name", "v1")),
        ("owner/na.me-2@refs/pr/3", HubRepository("owner/na.me-2", "refs/pr/3")),
        ("hf://owner/name", HubRepository("owner/name")),
        ("hf://owner/name@v1/unet/x.safetensors", HubRepository("owner/name", "v1", "unet/x.safetensors")),
        ("https://h/x/model.safetensors?sig=1", RemoteFile("https://h/x/model.safetensors?sig=1")),
        ("s3://bucket/model", RemoteFile("s3://bucket/model")),
        ("simplecache::s3://bucket/model", RemoteFile("simplecache::s3://bucket/model")),
        ("zip://model.safetensors::s3://bucket/x.zip", RemoteFile("zip://model.safetensors::s3://bucket/x.zip")),
        ("filecache::blockcache::s3://bucket", RemoteFile("filecache::blockcache::s3://bucket")),
        ("a::b", Path("a::b")),
        ("file:///x/y%20z", Path("/x/y z")),
        ("./owner/name", Path("owner/name")),
        ("../owner/name", Path("../owner/name")),
        ("owner/name/more", Path("owner/name/more")),
        ("name", Path("name")),
        ("/owner/name", Path("/owner/name")),
        ("owner/name@", Path("owner/name@")),
        ("C://x", Path("C://x")),
        (Path("owner/name"), Path("owner/name")),
    ],
)
def test_what_a_place_means(where: str | Path, meaning: object) -> None:
    assert located(where) == meaning


def test_what_is_on_this_machine_is_local_and_what_names_no_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert located("owner/name") == Path("owner/name")
    with pytest.raises(CheckpointError, match="names no repository"):
        located("hf://name")
    with pytest.raises(CheckpointError, match="An empty string names no checkpoint"):
        located("")


def test_a_signature_is_not_spread_by_messages() -> None:
    file = RemoteFile("https://h/x/model.safetensors?sig=secret")
    assert (str(file), file.name, file.suffix) == ("https://h/x/model.safetensors", "model.safetensors", ".safetensors")


@pytest.mark.parametrize(
    ("url", "name", "beside"),
    [
        ("https://h/x/a%20b.safetensors?sig=a/b", "a b.safetensors", "https://h/x/n%20w?sig=a/b"),
        ("http://[::1]:80/x/a.bin", "a.bin", "http://[::1]:80/x/n%20w"),
        ("s3://bucket/x/a%20b.safetensors", "a%20b.safetensors", "s3://bucket/x/n w"),
        ("simplecache::s3://bucket/x/a.bin", "a.bin", "simplecache::s3://bucket/x/n w"),
        ("simplecache::http://[::1]:80/x/a.bin", "a.bin", "simplecache::http://[::1]:80/x/n w"),
        ("zip://x/a.bin::simplecache::s3://bucket/y/z.zip", "a.bin", "zip://x/n w::simplecache::s3://bucket/y/z.zip"),
        ("local:///a.bin", "a.bin", "local:///n w"),
        ("http://h/a.bin", "a.bin", "http://h/n%20w"),
        ("simplecache::zip://a.bin::s3://bucket/y/z.zip", "a.bin", "simplecache::zip://n w::s3://bucket/y/z.zip"),
    ],
)
def test_names_and_neighbours_of_remote_files(url: str, name: str, beside: str) -> None:
    assert RemoteFile(url).name == name
    assert remote_beside(RemoteFile(url), "n w") == RemoteFile(beside)


@pytest.mark.parametrize("where", ["sharded", "sharded/", "sharded/model.safetensors.index.json", "one", "one/model.safetensors"])
def test_headers_come_by_ranges_and_no_weights(server: RangeServer, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.loading.remote.headers.FIRST_BYTES", 64)
    checkpoint = Checkpoint.open(server.url(where))
    assert {name: (entry.shape, entry.dtype) for name, entry in checkpoint.entries.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in whole().items()
    }
    assert checkpoint.format == "safetensors"
    fetched = sum(end - start for path, start, end in server.requests if path.endswith(".safetensors") and end is not None)
    assert fetched < 2000
    for entry in checkpoint.entries.values():
        data = server.files[entry.file.url.partition("/")[2].partition("/")[2].partition("/")[2]]
        value = whole()[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[entry.offset : entry.offset + entry.nbytes] == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["sharded", "one/model.safetensors"])
def test_weights_are_streamed_into_place(server: RangeServer, where: str, dtype: torch.dtype) -> None:
    filled = model(dtype)
    load(filled, Checkpoint.open(server.url(where)))
    assert is_filled(filled, dtype)


def join_fetching_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "bigmodel-fetch":
            thread.join(100)
            assert not thread.is_alive()


def cuts(answer: Answer) -> None:
    """Every connection brings half of what was asked for, but at least one byte."""
    answer.cut = max(1, len(answer.body) // 2)


def unavailable(answer: Answer) -> None:
    """Every range has to be asked for three times."""
    if answer.times < 3:
        answer.status, answer.body = 503, b"busy"
        answer.headers = {"Retry-After": "1"}


def short_answers(answer: Answer) -> None:
    """Fewer bytes than asked for, and the header says so."""
    if answer.status == 206 and len(answer.body) > 10:
        total = answer.headers["Content-Range"].partition("/")[2]
        answer.body = answer.body[: len(answer.body) * 2 // 3]
        answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.start + len(answer.body) - 1}/{total}"


def too_long_answers(answer: Answer) -> None:
    answer.body += b"more"


def slow(answer: Answer) -> None:
    answer.pause_seconds = 0.002


@pytest.mark.parametrize("fault", [cuts, unavailable, short_answers, too_long_answers, slow])
def test_servers_that_misbehave_but_send_it_in_the_end(server: RangeServer, fault: Callable[[Answer], None]) -> None:
    server.fault = fault
    filled, _ = loaded(server.url("sharded"))
    assert is_filled(filled)


def test_a_cut_is_resumed_where_it_was(server: RangeServer) -> None:
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))
    cut: list[tuple[int, int]] = []
    chance = iter([True])  # only one of the server's threads gets it

    def cut_once(answer: Answer) -> None:
        if len(answer.body) > 2000 and next(chance, False):
            cut.append((answer.start, answer.start + len(answer.body)))
            answer.cut = 1500

    server.fault = cut_once
    filled = model()
    load(filled, checkpoint)
    assert is_filled(filled)
    ((start, end),) = cut
    assert [request for request in server.requests if request[1:] == (start + 1500, end)] == [("one/model.safetensors", start + 1500, end)]


def test_ctrl_c_ends_a_load_from_a_silent_server_at_once(server: RangeServer) -> None:
    """In a process of its own, as Ctrl-C reaches it."""
    program = (
        "import sys, torch\n"
        "from bigmodel.loading import Checkpoint, ranges\n"
        "from bigmodel.loading.remote import http, reader\n"
        "from bigmodel import load_and_dispatch\n"
        "ranges.DIRECT_BYTES = reader.SHORTEST_REQUEST_BYTES = 4096\n"
        "http.SILENCE_SECONDS = 1000.0\n"
        "checkpoint = Checkpoint.open(sys.argv[1])\n"
        "with torch.device('meta'): model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 320))\n"
        "print('opened', flush=True)\n"
        "try: load_and_dispatch(model, checkpoint, device_map={'': 'cpu'})\n"
        "except KeyboardInterrupt: print('interrupted', all(p.is_meta for p in model.parameters()), flush=True)\n"
    )
    release = threading.Event()
    reached = threading.Event()

    def silent(answer: Answer) -> None:
        if answer.start > 8:
            reached.set()
            release.wait()

    server.fault = silent
    run = subprocess.Popen([sys.executable, "-c", program, server.url("one/model.safetensors")], stdout=subprocess.PIPE, text=True)
    try:
        assert reached.wait(200)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=100)  # the server stays silent
        assert out.splitlines() == ["opened", "interrupted True"]
        assert run.returncode == 0
    finally:
        release.set()
        run.kill()
        run.communicate()


def test_ctrl_c_while_fetching_threads_start_stops_them(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))
    release = threading.Event()
    server.fault = lambda answer: release.wait() and None
    real = torch.set_num_threads
    interrupts = iter([True])

    def interrupted(count: int) -> None:
        if threading.current_thread() is threading.main_thread() and next(interrupts, False):
            raise KeyboardInterrupt
        real(count)

    monkeypatch.setattr(torch, "set_num_threads", interrupted)
    threads_before = torch.get_num_threads()
    destination = torch.zeros(64, 48)
    entries = checkpoint.entries
    try:
        with pytest.raises(KeyboardInterrupt):
            Reader(checkpoint.identities).read([(lower(Whole("0.weight"), entries, "0.weight", torch.float32), destination)])
    finally:
        release.set()
    join_fetching_threads()
    assert not destination.any()
    assert torch.get_num_threads() == threads_before


def test_ctrl_c_while_many_headers_are_asked_for_ends_at_once(server: RangeServer) -> None:
    program = (
        "import sys\n"
        "from bigmodel.loading import Checkpoint\n"
        "from bigmodel.loading.remote import http\n"
        "http.SILENCE_SECONDS = 1000.0\n"
        "try: Checkpoint.open(sys.argv[1])\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    release, reached = threading.Event(), threading.Event()

    def silent(answer: Answer) -> None:
        if answer.path.endswith(".safetensors"):
            reached.set()
            release.wait()

    server.fault = silent
    run = subprocess.Popen(
        [sys.executable, "-c", program, server.url("sharded/model.safetensors.index.json")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert reached.wait(200)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=100)  # the server stays silent
        assert out == "interrupted\n"
        assert run.returncode == 0
    finally:
        release.set()
        run.kill()
        run.communicate()


def test_a_server_that_falls_silent_is_asked_again(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))
    monkeypatch.setattr(http, "SILENCE_SECONDS", 0.2)
    release = threading.Event()
    chance = iter([True])
    silenced: list[tuple[int, int]] = []

    def silent_once(answer: Answer) -> None:
        if len(answer.body) > 2000 and next(chance, False):
            silenced.append((answer.start, answer.start + len(answer.body)))
            release.wait()

    server.fault = silent_once
    filled = model()
    try:
        load(filled, checkpoint)
    finally:
        release.set()
    assert is_filled(filled)
    assert server.requests.count(("one/model.safetensors", *silenced[0])) >= 2


def test_weights_stream_to_an_accelerator(server: RangeServer, accelerators: Callable[..., None]) -> None:
    accelerators(1, memory="8MiB")
    for dtype in (torch.float32, torch.bfloat16):
        filled = model(dtype)
        load(filled, Checkpoint.open(server.url("sharded")), {"": 0})
        assert {parameter.device for parameter in filled.parameters()} == {torch.device(torch.accelerator.current_accelerator().type, 0)}
        assert is_filled(filled.cpu(), dtype)


def test_a_server_without_ranges_sends_every_file_once(server: RangeServer) -> None:
    def without(answer: Answer) -> None:
        if answer.status == 206:
            answer.status, answer.body = 200, server.files[answer.path]
            del answer.headers["Content-Range"]

    server.fault = without
    checkpoint = Checkpoint.open(server.url("sharded"))
    before = len(server.requests)
    filled = model()
    load(filled, checkpoint)
    assert is_filled(filled)
    assert sorted(path for path, _, _ in server.requests[before:]) == [name for name in sorted(server.files) if "-of-" in name]


@pytest.mark.parametrize("cut_bytes", [9000, 40000])
def test_a_server_without_ranges_that_never_gets_further_is_given_up(server: RangeServer, cut_bytes: int) -> None:
    """Also where what it sends again and again is received before it stops."""
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))

    def without(answer: Answer) -> None:
        answer.status, answer.body, answer.cut = 200, server.files[answer.path], cut_bytes
        del answer.headers["Content-Range"]

    assert cut_bytes < len(server.files["one/model.safetensors"])
    server.fault = without
    empty = model()
    with pytest.raises(CheckpointError, match=r"cannot be read from byte \d+ on; gave up after 6 attempts in a row"):
        load(empty, checkpoint)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_server_that_gets_a_little_further_every_time_is_asked_until_it_is_through(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SHORTEST_REQUEST_BYTES", 1 << 20)
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))
    turns = itertools.count(1)

    def without(answer: Answer) -> None:
        answer.status, answer.body = 200, server.files[answer.path]
        answer.cut = len(answer.body) * next(turns) // 20
        del answer.headers["Content-Range"]

    server.fault = without
    filled = model()
    load(filled, checkpoint)
    assert is_filled(filled)
    assert next(turns) > 15


def test_answers_that_a_server_keeps_short_are_progress_and_the_rest_is_asked_for_at_once(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(http, "wait", lambda failures, *_: waits.append(failures))

    def capped(answer: Answer) -> None:
        answer.body = answer.body[:500]
        total = answer.headers["Content-Range"].partition("/")[2]
        answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.start + len(answer.body) - 1}/{total}"

    server.fault = capped
    filled, _ = loaded(server.url("one/model.safetensors"))
    assert is_filled(filled)
    assert len(server.requests) >= len(server.files["one/model.safetensors"]) // 500
    assert waits == []


def test_short_answers_without_a_byte_are_given_up(server: RangeServer) -> None:
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))

    def empty_range(answer: Answer) -> None:
        total = answer.headers["Content-Range"].partition("/")[2]
        answer.body = b""
        answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.start - 1}/{total}"

    server.fault = empty_range
    with pytest.raises(CheckpointError, match="gave up after 6 attempts in a row"):
        load(model(), checkpoint)


def test_redirects_are_followed_once_and_again_when_they_expire(server: RangeServer) -> None:
    data = server.files["kept/model.safetensors"] = server.files["one/model.safetensors"]
    asked: list[str] = []
    kept = itertools.count(1)

    def redirect(answer: Answer) -> None:
        asked.append(answer.path)
        if answer.path == "one/model.safetensors":
            answer.status, answer.body, answer.headers = 302, b"", {"Location": server.url("kept/model.safetensors?sig=1")}
        elif next(kept) == 3:
            answer.status, answer.body, answer.headers = 403, b"", {}

    server.fault = redirect
    filled, _ = loaded(server.url("one/model.safetensors"))
    assert is_filled(filled)
    assert len(data) > 3 * 4096
    assert 2 <= asked.count("one/model.safetensors") < asked.count("kept/model.safetensors")


def test_the_token_follows_a_redirect_within_the_hub_and_no_other(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.files["kept/model.safetensors"] = server.files["one/model.safetensors"]

    def redirect(answer: Answer) -> None:
        if answer.path == "one/model.safetensors":
            answer.status, answer.body, answer.headers = 307, b"", {"Location": server.url("kept/model.safetensors")}

    server.fault = redirect
    monkeypatch.setattr(constants, "ENDPOINT", server.url("").rstrip("/"))
    filled, _ = loaded(server.url("one/model.safetensors"))
    assert is_filled(filled)
    assert set(server.tokens) == {"Bearer hf_secret"}

    def away(answer: Answer) -> None:
        answer.status, answer.headers = 307, {"Location": server.url("kept/model.safetensors")}

    with RangeServer({}, away) as other:
        monkeypatch.setattr(constants, "ENDPOINT", other.url("").rstrip("/"))
        server.tokens.clear()
        filled, _ = loaded(other.url("x/model.safetensors"))
        assert is_filled(filled)
        assert set(server.tokens) == {None}
        assert set(other.tokens) == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda answer: setattr(answer, "status", 500), "gave up after 6 attempts in a row .*answered 500"),
        (lambda answer: setattr(answer, "cut", 0), "cannot be read from byte .* gave up"),
        (lambda answer: setattr(answer, "status", 401), "refuses access"),
        (lambda answer: setattr(answer, "status", 418), "answered 418"),
        (lambda answer: answer.headers.update({"Content-Range": ""}), "does not say which"),
        (lambda answer: answer.headers.update({"Content-Range": "bytes 7-9/100"}), "bytes 7-9/100"),
        (lambda answer: answer.headers.update({"Content-Encoding": "gzip"}), "compresses"),
        (lambda answer: answer.headers.update({"ETag": '"other"'}), "has changed since it was opened .its ETag"),
        (lambda answer: answer.headers.update({"Content-Range": f"bytes {answer.start}-9/10"}), "has changed since it was opened"),
    ],
)
def test_what_no_attempt_mends_is_refused_and_the_model_stays_as_it_was(
    server: RangeServer, change: Callable[[Answer], None], says: str
) -> None:
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))
    server.fault = change
    empty = model()
    with pytest.raises(CheckpointError, match=says) as error:
        load(empty, checkpoint)
    assert "one/model.safetensors" in str(error.value)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_gguf_streams_as_well(server: RangeServer, tmp_path: Path) -> None:
    import gguf

    packed = gguf.quantize(whole()["0.weight"][:, :32].contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    server.files["x.gguf"] = (tmp_path / "x.gguf").read_bytes()
    with torch.device("meta"):
        linear = nn.Linear(32, 64, bias=False)
    load(linear, Checkpoint.open(server.url("x.gguf")))
    assert torch.equal(linear.weight, torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0).copy()))


def test_what_is_not_there(server: RangeServer) -> None:
    for where in ("nothing.safetensors", "nothing", "one/nothing.safetensors.index.json"):
        with pytest.raises(CheckpointNotFoundError, match="nothing"):
            Checkpoint.open(server.url(where))
    with pytest.raises(CheckpointError, match=r"\.metadata.*not a table of a distributed checkpoint"):
        Checkpoint.open(server.url("folder/.metadata"))
    with pytest.raises(CheckpointError, match="no such kind of URL"):
        Checkpoint.open("nosuchscheme://x/y")


def test_headers_from_strangers_are_checked_as_local_ones_are(server: RangeServer) -> None:
    good = server.files["one/model.safetensors"]
    for name, data, says in [
        ("cut", good[:-5], "truncated: expected"),
        ("longer", good + b"xxx", "3 at the end belong to no tensor"),
        ("huge", (1 << 60).to_bytes(8, "little") + good[8:], "its header claims"),
        ("tiny", b"abc", "expected at least 8 bytes"),
    ]:
        server.files[f"{name}.safetensors"] = data
        with pytest.raises(CheckpointError, match=says):
            Checkpoint.open(server.url(f"{name}.safetensors"))
    server.files["bad/model.safetensors.index.json"] = b'{"weight_map": {"a": "../x.safetensors"}}'
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint.open(server.url("bad"))


def test_what_stays_on_disk_is_fetched_when_it_is_read_and_survives_copies_and_pickles(
    server: RangeServer, caplog: pytest.LogCaptureFixture
) -> None:
    filled, report = loaded(server.url("sharded"), device_map={"0": "cpu", "1": "disk"})
    assert "are fetched over the network whenever they are used" in caplog.text
    assert filled[1].weight.is_meta
    store = report.store
    assert store is not None
    for each in (store, copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        rows = torch.empty(2, 64)
        each.read_rows("1.weight", torch.tensor([5, 300]), rows)
        assert torch.equal(rows, whole()["1.weight"].float()[[5, 300]])


def test_an_error_in_one_request_ends_the_others_and_leaves_the_destination_alone(server: RangeServer) -> None:
    checkpoint = Checkpoint.open(server.url("one/model.safetensors"))
    release = threading.Event()
    counter = itertools.count(1)

    def one_fails_others_hang(answer: Answer) -> None:
        number = next(counter)
        if number == 2:
            answer.status = 418
        elif number > 2:
            release.wait()

    server.fault = one_fails_others_hang
    entries = checkpoint.entries
    jobs = [
        (lower(Whole(name), entries, name, entry.dtype), torch.zeros(entry.shape, dtype=entry.dtype)) for name, entry in entries.items()
    ]
    try:
        with pytest.raises(CheckpointError, match="418"):
            Reader(checkpoint.identities).read(jobs)
        before = [tensor.clone() for _, tensor in jobs]
    finally:
        release.set()
    join_fetching_threads()
    assert all(torch.equal(was, tensor) for was, (_, tensor) in zip(before, jobs, strict=True))


def test_any_url_of_fsspec(tmp_path: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for name, data in sharded_files().items():
        system.pipe_file(f"/bucket/{name}", data)
    system.pipe_file("/bucket/README.md", b"")
    try:
        for where in ("memory://bucket", "memory://bucket/model.safetensors.index.json"):
            filled, _ = loaded(where)
            assert is_filled(filled)
        with pytest.raises(CheckpointNotFoundError, match="no such file"):
            Checkpoint.open("memory://nothing")
        with pytest.raises(CheckpointNotFoundError, match="no such file"):
            Checkpoint.open("memory://bucket/nothing.safetensors")
    finally:
        system.rm("/bucket", recursive=True)


@pytest.fixture
def bucket() -> Iterator[Callable[[str, bytes], None]]:
    """Puts files into fsspec's memory, under memory://bucket."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield lambda name, data: system.pipe_file(f"/bucket/{name}", data)
    system.rm("/bucket", recursive=True)


def test_a_file_of_fsspec_that_has_changed_is_refused(bucket: Callable[[str, bytes], None]) -> None:
    """By whatever of it is read, also where its size stays."""
    bucket("model.safetensors", save(whole()))
    checkpoint = Checkpoint.open("memory://bucket/model.safetensors")
    on_disk = load(model(), checkpoint, {"": "disk"}).store
    assert on_disk is not None
    rows = torch.empty(2, 64)
    on_disk.read_rows("1.weight", torch.tensor([5, 300]), rows)
    assert torch.equal(rows, whole()["1.weight"].float()[[5, 300]])
    bucket("model.safetensors", save({name: value + 1 for name, value in whole().items()}))
    empty = model()
    with pytest.raises(CheckpointError, match=r"memory://bucket/model.safetensors: the file has changed since it was opened"):
        load(empty, checkpoint)
    assert all(parameter.is_meta for parameter in empty.parameters())
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        on_disk.read_rows("1.weight", torch.tensor([5, 300]), rows)
    bucket("model.safetensors", save(whole())[:-1000])
    with pytest.raises(CheckpointError, match=r"has changed since it was opened .it had \d+ bytes and has \d+ now"):
        load(empty, checkpoint)


def test_a_file_of_fsspec_that_changes_while_it_is_read_is_refused(
    bucket: Callable[[str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    bucket("model.safetensors", save(whole()))
    checkpoint = Checkpoint.open("memory://bucket/model.safetensors")
    read = MemoryFileSystem.cat_file
    turns = itertools.count(1)

    def changing(*arguments: object, **named: object) -> bytes:
        data: bytes = read(*arguments, **named)
        if next(turns) == 3:
            bucket("model.safetensors", save({name: value + 1 for name, value in whole().items()}))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", changing)
    empty = model()
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        load(empty, checkpoint)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert next(turns) > 3


def test_what_a_file_system_has_listed_before_is_not_taken_for_the_file_as_it_is(bucket: Callable[[str, bytes], None]) -> None:
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Listing(MemoryFileSystem):
        """As those of object stores, which answer from the last listing."""

        protocol = "listing"
        told: dict[str, dict[str, object]] = {}  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("listing://").strip("/")

        def info(self, path: str, **arguments: object) -> dict[str, object]:
            if path not in self.told:
                self.told[path] = super().info(path) | {"ETag": hash(self.store[path].getvalue())}
            return self.told[path]

        def invalidate_cache(self, path: str | None = None) -> None:
            for known in [known for known in self.told if known.startswith(path or "")]:
                del self.told[known]

    fsspec.register_implementation("listing", Listing, clobber=True)
    bucket("model.safetensors", save(whole()))
    checkpoint = Checkpoint.open("listing://bucket/model.safetensors")
    bucket("model.safetensors", save({name: value + 1 for name, value in whole().items()}))
    with pytest.raises(CheckpointError, match=r"has changed since it was opened .its ETag"):
        load(model(), checkpoint)


@pytest.mark.parametrize(
    "chain", ["simplecache::memory://bucket/{}", "zip://{}::memory://bucket/all.zip", "simplecache::zip://{}::memory://bucket/all.zip"]
)
def test_chains_of_fsspec(bucket: Callable[[str, bytes], None], chain: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in sharded_files().items():
            bucket(name, data)
            archive.writestr(name, data)
    bucket("all.zip", packed.getvalue())
    for where in ("", "model.safetensors.index.json"):
        filled, _ = loaded(chain.format(where))
        assert is_filled(filled)
    with pytest.raises(CheckpointNotFoundError, match="there is no such file"):
        Checkpoint.open(chain.format("nothing.safetensors"))


def test_names_in_file_systems_are_taken_as_they_are(bucket: Callable[[str, bytes], None]) -> None:
    for number, state in enumerate(states()):
        bucket(f"a b%20#-0000{number + 1}-of-00002.safetensors", save(state))
    filled, _ = loaded("memory://bucket")
    assert is_filled(filled)
