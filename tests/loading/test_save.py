"""save_model: complete, streamed, atomic, aliases once; what it writes is read by safetensors, torch and bigmodel alike."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, init_empty_weights, load, load_state_dict, save_model

Build = Callable[..., nn.Module]


def reloaded(build: Build, folder: Path) -> nn.Module:
    with init_empty_weights():
        model = build()
    load(model, Checkpoint.open(folder), strict=True)
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [10**9, 3000, 1])
def test_whole_and_sharded(filled: nn.Module, tied: Build, tmp_path: Path, safe: bool, limit: int) -> None:
    files = save_model(filled, tmp_path / "out", limit, safe_serialization=safe, metadata={"who": "me"})
    assert all(file.is_file() for file in files)
    assert (len(files) > 1) == (limit < 10**9)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    assert names == {file.name for file in files} | ({index} if len(files) > 1 else set())
    assert_same(reloaded(tied, tmp_path / "out"), filled)
    for file in files:
        sizes = {entry.offset: entry.nbytes for entry in Checkpoint.open(file).entries.values()}
        assert len(sizes) == 1 or sum(sizes.values()) <= limit
    if len(files) > 1:
        content = json.loads((tmp_path / "out" / index).read_text())
        assert content["metadata"]["total_size"] == sum(v.nbytes for n, v in filled.state_dict().items() if n != "head.weight")


def test_safetensors_alone_reads_it(filled: nn.Module, tied: Build, tmp_path: Path) -> None:
    (file,) = save_model(filled, tmp_path)
    found = safetensors.torch.load_file(file)
    assert all(torch.equal(found[name], filled.state_dict()[name]) for name in found)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = tied()
    assert safetensors.torch.load_model(model, file) == (set(), [])
    assert_same(model, filled)
    assert load_state_dict(file).keys() == found.keys()


class Views(nn.Module):
    """Two names of one memory, parts of it, a turned tensor, and dtypes of every width."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(4, 6)
        self.register_buffer("whole", base)
        self.register_buffer("same", base.view(4, 6))
        self.register_buffer("part", base[1:3])
        self.register_buffer("turned", base.t())
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("narrow", torch.randn(3).half())
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("fp8", torch.randn(5).to(torch.float8_e4m3fn))


def test_views_of_one_memory_are_saved_once_and_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Views()
    (file,) = save_model(model, tmp_path)
    checkpoint = Checkpoint.open(file)
    assert "same" not in checkpoint.entries
    assert checkpoint.metadata["same"] == "whole"
    other = Views()
    load(other, checkpoint, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name].float(), value.float()), name
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in checkpoint.entries.values())


def test_weights_from_elsewhere_are_fetched_one_at_a_time(filled: nn.Module, tied: Build, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = tied()
    fetched: list[str] = []

    def fetch(name: str) -> torch.Tensor:
        fetched.append(name)
        return filled.state_dict()[name]

    save_model(model, tmp_path, fetch=fetch)
    assert sorted(fetched) == sorted(name for name in filled.state_dict() if name != "head.weight")
    assert_same(reloaded(tied, tmp_path), filled)


def test_from_an_accelerator(filled: nn.Module, tied: Build, tmp_path: Path, accelerators: Callable[..., list[torch.device]]) -> None:
    (device,) = accelerators(1)
    filled.to(device)
    save_model(filled, tmp_path)
    found = reloaded(tied, tmp_path)
    assert_same(found, filled.to("cpu"))


def test_meta_tensors_are_refused_before_a_file_appears(tied: Build, tmp_path: Path) -> None:
    with init_empty_weights():
        model = tied()
    with pytest.raises(CheckpointError, match=r"have no values to save \(they are on meta\): embed\.weight"):
        save_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_an_error_leaves_the_folder_as_it_was(filled: nn.Module, tmp_path: Path, existing: bool) -> None:
    folder = tmp_path / "out"
    if existing:
        save_model(filled, folder, 3000)
    before = {file.name: file.read_bytes() for file in folder.iterdir()} if existing else None

    def fetch(name: str) -> torch.Tensor:
        if name == "steps":
            raise KeyboardInterrupt
        return filled.state_dict()[name] + 1

    with pytest.raises(KeyboardInterrupt):
        save_model(filled, folder, fetch=fetch)
    assert ({file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else None) == before
    with pytest.raises(CheckpointError, match=r"'block\.1\.num_batches_tracked' should be saved with shape \[\] .*came with \[2\]"):
        save_model(filled, folder, fetch=lambda name: torch.ones(2))


def test_shards_of_an_earlier_save_go(filled: nn.Module, tied: Build, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for limit in (1, 3000, 10**9, 3000):
        files = save_model(filled, tmp_path, limit)
        left = {file.name for file in tmp_path.iterdir()} - {"config.json", "model.safetensors.index.json"}
        assert left == {file.name for file in files}
        assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
        assert_same(reloaded(tied, tmp_path), filled)


def test_an_entry_of_the_state_dict_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Stranger(nn.Module):
        def state_dict(self, **_: object) -> dict[str, object]:
            return {"a": {"b": 1}}

    with pytest.raises(CheckpointError, match="'a' in the state dict is a dict"):
        save_model(Stranger(), tmp_path)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files cannot grow beyond 1000 bytes: what the system says then takes the same way as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk_leaves_nothing(filled: nn.Module, tmp_path: Path, safe: bool, full_disk: None) -> None:
    with pytest.raises(CheckpointError, match=r"out/deep: .*File too large") as caught:
        save_model(filled, tmp_path / "out" / "deep", safe_serialization=safe)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/below", "name" * 100])
def test_folders_that_cannot_be(filled: nn.Module, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(CheckpointError) as caught:
        save_model(filled, tmp_path / where)
    assert str(caught.value).startswith(str(tmp_path / where))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_folder_in_place_of_a_file(filled: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "model-00002-of-00002.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"folders are in the way of the files model-00002-of-00002\.safetensors"):
        save_model(filled, tmp_path, 4000)
    assert [path.name for path in tmp_path.iterdir()] == ["model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("metadata", [{"step": 3}, {3: "step"}])
def test_metadata_that_no_reader_would_take_are_refused(filled: nn.Module, tmp_path: Path, metadata: dict[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="files hold text"):
        save_model(filled, tmp_path / "saved", metadata=metadata)
    assert not (tmp_path / "saved").exists()


def test_a_url_is_no_folder(filled: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="s3://bucket/model: models are saved into a folder on this machine"):
        save_model(filled, "s3://bucket/model")
    assert list(tmp_path.iterdir()) == []
