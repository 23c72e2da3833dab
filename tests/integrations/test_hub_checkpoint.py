"""A checkpoint on the hub is opened by its headers, and its weights stream into place; what the cache has is not fetched."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hub_server import COMMIT, Hub
from huggingface_hub import HfApi, constants, snapshot_download
from safetensors.torch import load_file

import bigmodel
from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.integrations.transformers import empty_model
from bigmodel.loading import Checkpoint, load
from bigmodel.loading.location import RemoteFile
from bigmodel.loading.remote import hub as hub_module
from bigmodel.loading.remote import retry


def values(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def distributed_files(state: dict[str, torch.Tensor], folder: Path) -> dict[str, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()} | {"config.json": b"{}"}


def torch_file(state: dict[str, torch.Tensor]) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


@pytest.fixture
def hub(checkpoint_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in checkpoint_folder("llama").iterdir()}
    repositories = {
        "owner/llama": files,
        "owner/parts": {f"text/{name}": data for name, data in files.items()} | {"README.md": b""},
        "owner/old": {"config.json": b"{}", "pytorch_model.bin": b"x"},
        "owner/torch": {"config.json": files["config.json"], "pytorch_model.bin": torch_file(values(checkpoint_folder("llama")))},
        "owner/distributed": distributed_files(values(checkpoint_folder("llama")), tmp_path / "saved"),
        "owner/gated": files,
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)
    with Hub(repositories, gated=frozenset({"owner/gated"})) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        yield running


@pytest.mark.parametrize(
    "where", ["owner/llama", "owner/llama@main", f"hf://owner/llama@{COMMIT}", "hf://owner/parts/text", "hf://owner/parts@main/text/"]
)
def test_headers_are_fetched_and_nothing_else(hub: Hub, where: str, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(where)
    local = Checkpoint.open(checkpoint_folder("llama"))
    assert {name: (entry.shape, entry.dtype, entry.offset) for name, entry in checkpoint.entries.items()} == {
        name: (entry.shape, entry.dtype, entry.offset) for name, entry in local.entries.items()
    }
    assert str(checkpoint.location).startswith(f"hf://owner/{'parts' if 'parts' in where else 'llama'}@{COMMIT}")
    assert len(hub.fetched) == len(local.files) + 1
    assert not (tmp_path / "cache").exists()


def test_weights_stream_into_a_model(hub: Hub, checkpoint_folder: Callable[[str], Path]) -> None:
    model = empty_model(checkpoint_folder("llama"))
    load(model, Checkpoint.open("owner/llama"))
    expected = values(checkpoint_folder("llama"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    again = empty_model(checkpoint_folder("llama"))
    bigmodel.load_checkpoint_and_dispatch(again, "owner/llama", device_map={"": "cpu"})
    assert all(torch.equal(again.state_dict()[name], value) for name, value in expected.items())


def test_a_file_of_torch_streams_as_well_and_is_kept_on_request(hub: Hub, checkpoint_folder: Callable[[str], Path]) -> None:
    expected = values(checkpoint_folder("llama"))
    for where, keep in (("owner/torch", False), ("owner/torch", True)):
        model = empty_model(checkpoint_folder("llama"))
        checkpoint = Checkpoint.open(where, keep=keep)
        load(model, checkpoint)
        assert checkpoint.format == "torch"
        assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    (kept,) = Checkpoint.open("owner/torch").files
    assert isinstance(kept, Path)
    assert kept.read_bytes() == hub.repositories["owner/torch"]["pytorch_model.bin"]


def test_a_distributed_checkpoint_streams_as_well_and_is_kept_on_request(hub: Hub, checkpoint_folder: Callable[[str], Path]) -> None:
    expected = values(checkpoint_folder("llama"))
    for keep in (False, True):
        model = empty_model(checkpoint_folder("llama"))
        checkpoint = Checkpoint.open("owner/distributed", keep=keep)
        load(model, checkpoint)
        assert checkpoint.format == "torch.distributed"
        assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    kept = {file.name: file for file in Checkpoint.open("owner/distributed").files}
    assert isinstance(kept["__0_0.distcp"], Path)
    model = empty_model(checkpoint_folder("llama"))
    load(model, Checkpoint.open("owner/distributed"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_what_the_cache_has_is_not_fetched_and_is_all_there_is_without_a_connection(
    hub: Hub, checkpoint_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(snapshot_download("owner/llama", allow_patterns=["model-00001*", "*.index.json"], endpoint=hub.endpoint))
    hub.fetched.clear()
    mixed = Checkpoint.open("owner/llama")
    local = [file for file in mixed.files if not isinstance(file, RemoteFile)]
    assert local == sorted(folder.glob("*.safetensors"))
    assert not any(name.startswith("model-00001") or name.endswith(".json") for name in hub.fetched)
    model = empty_model(checkpoint_folder("llama"))
    load(model, mixed)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values(checkpoint_folder("llama")).items())

    snapshot_download("owner/llama", endpoint=hub.endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert all(isinstance(file, Path) for file in Checkpoint.open("owner/llama").files)
    with pytest.raises(CheckpointNotFoundError, match="cannot be reached"):
        Checkpoint.open("owner/parts")


def test_a_busy_hub_is_asked_again(hub: Hub, checkpoint_folder: Callable[[str], Path]) -> None:
    hub.busy = 3
    assert Checkpoint.open("owner/llama").entries.keys() == Checkpoint.open(checkpoint_folder("llama")).entries.keys()
    hub.busy = 1000
    with pytest.raises(CheckpointNotFoundError, match="cannot be reached"):
        Checkpoint.open("owner/llama")


def test_a_busy_hub_is_soon_given_up_where_the_cache_has_the_checkpoint(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(snapshot_download("owner/llama", allow_patterns=["model*"], endpoint=hub.endpoint))
    waits: list[int] = []
    monkeypatch.setattr(hub_module, "wait", lambda failures, *_: waits.append(failures))
    for where in ("owner/llama", f"owner/llama@{COMMIT}"):
        hub.busy = 1000
        checkpoint = Checkpoint.open(where)
        assert set(checkpoint.files) == set(folder.glob("*.safetensors"))
        assert hub.busy == 1000 - 2
        assert waits == [1]
        assert f"{where}: the hub does not answer" in caplog.text
        assert f"what its cache has is used: {folder}" in caplog.text
        waits.clear()
        caplog.clear()
    hub.busy = 1  # it answers the second time
    assert Checkpoint.open("owner/llama").location == f"hf://owner/llama@{COMMIT}"
    assert caplog.text == ""


def test_a_busy_hub_is_asked_on_where_the_cache_has_a_part_of_the_checkpoint(hub: Hub) -> None:
    snapshot_download("owner/llama", allow_patterns=["model-00001*", "*.index.json"], endpoint=hub.endpoint)
    hub.busy = 4
    files = Checkpoint.open("owner/llama").files
    assert {type(file) for file in files} == {RemoteFile, type(Path())}
    hub.busy = 1000
    with pytest.raises(CheckpointError, match=r"cannot be reached .* not all of it: .* names the file 'model-0000\d-of-00008"):
        Checkpoint.open("owner/llama")
    assert hub.busy == 1000 - 6


def test_a_silent_hub_is_not_waited_for_as_long_where_the_cache_has_the_checkpoint(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    real = HfApi.model_info

    def model_info(*arguments: object, timeout: float, **named: object) -> object:
        asked.append(timeout)
        return real(*arguments, timeout=timeout, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(HfApi, "model_info", model_info)
    Checkpoint.open("owner/llama")
    snapshot_download("owner/llama", endpoint=hub.endpoint)
    asked_before = len(asked)
    Checkpoint.open("owner/llama")
    assert asked[0] == 30.0
    assert asked[asked_before:] == [constants.HF_HUB_ETAG_TIMEOUT]


@pytest.mark.parametrize("where", ["owner/llama", "hf://owner/parts/text"])
def test_what_streams_by_is_kept_in_the_cache(
    hub: Hub, where: str, checkpoint_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = empty_model(checkpoint_folder("llama"))
    load(model, Checkpoint.open(where, keep=True))
    expected = values(checkpoint_folder("llama"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    hub.fetched.clear()
    kept = Checkpoint.open(where, verify=True)
    assert all(isinstance(file, Path) for file in kept.files)
    assert hub.fetched == []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert set(Checkpoint.open(where).entries) == set(expected)
    name = where.removeprefix("hf://").removesuffix("/text")
    folder = Path(snapshot_download(name, local_files_only=True)) / ("text" if where.endswith("text") else "")
    for file in checkpoint_folder("llama").glob("*.safetensors"):
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_what_is_kept_has_the_recorded_hash(hub: Hub, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open("owner/llama", keep=True)
    name = "model-00003-of-00008.safetensors"
    files = dict(hub.repositories["owner/llama"])
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    hub.repositories = {"owner/llama": files}
    model = empty_model(checkpoint_folder("llama"))
    with pytest.raises(CheckpointError, match=f"{name}: the bytes that were fetched are not those that the hub has recorded"):
        load(model, checkpoint)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_a_cache_that_cannot_be_written_to_is_a_warning(
    hub: Hub, checkpoint_folder: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint.open("owner/llama", keep=True)
    blobs = tmp_path / "cache" / "models--owner--llama" / "blobs"
    for file in blobs.iterdir():
        file.unlink()
    blobs.rmdir()
    blobs.write_text("a file where a folder should be")
    model = empty_model(checkpoint_folder("llama"))
    load(model, checkpoint)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values(checkpoint_folder("llama")).items())
    assert "is not kept in the hub's cache" in caplog.text


def test_only_what_is_read_for_the_most_part_is_kept(hub: Hub, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = empty_model(checkpoint_folder("llama"))
    load(model, Checkpoint.open("owner/llama", keep=True), {"": "disk"})
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    with pytest.raises(CheckpointError, match="keep=True is for repositories"):
        Checkpoint.open(f"{hub.endpoint}/owner/llama/resolve/main/model.safetensors.index.json", keep=True)


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    Checkpoint.open("owner/llama")
    assert set(hub.tokens) == {"Bearer hf_secret"}
    hub.tokens.clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    Checkpoint.open(f"{hub.endpoint}/owner/llama/resolve/main/model.safetensors.index.json")
    assert set(hub.tokens) == {None}


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("owner/absent", "'owner/absent' is neither a folder nor a model on the hub"),
        ("owner/llama@v9", "no branch, tag or commit 'v9'"),
        ("owner/gated", "'owner/gated' is gated"),
        ("owner/old", "not an archive of torch 1.6 or later"),
        ("hf://owner/llama/nothing", "is not a folder containing"),
        ("hf://owner/llama/nothing.safetensors", "is not a folder containing"),
        ("owner/parts", "holds: README.md"),
    ],
)
def test_what_cannot_be_had_is_explained(hub: Hub, where: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(where)
