"""Files of torch.save: entries inside the archive, whatever views the tensors are; nothing is unpickled that could run code."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, Reader, Whole
from bigmodel.loading.transfer import lower


def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    entry = checkpoint.entries[name]
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    Reader(checkpoint.identities).read([(lower(Whole(name), checkpoint.entries, name, entry.dtype), tensor)])
    return tensor


def test_views_shared_storages_and_strides_read_back_alike(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    state = {
        "whole": base,
        "row": base[2],
        "columns": base[:, 3:5],
        "turned": base.t(),
        "every_other": base[::2, ::3],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "half": nn.Parameter(torch.randn(5).half()),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    }
    torch.save(state, tmp_path / "x.bin")
    checkpoint = Checkpoint.open(tmp_path / "x.bin")
    assert checkpoint.format == "torch"
    assert list(checkpoint.entries) == list(state)
    for name, tensor in state.items():
        assert torch.equal(read(checkpoint, name).float(), tensor.detach().float()), name
        assert read(checkpoint, name).dtype == tensor.dtype


def test_non_tensors_beside_the_tensors_do_not_matter(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "epoch": 3, "_extra": {"b": torch.zeros(1)}}, tmp_path / "x.pt")
    assert list(Checkpoint.open(tmp_path / "x.pt").entries) == ["a"]


def test_a_nested_state_dict_is_refused_with_its_name(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="'state_dict' is one"):
        Checkpoint.open(tmp_path / "x.pt")


class Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_foreign_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "b": Code()}, "x.bin")
    with pytest.raises(CheckpointError, match=r"x\.bin.*foreign code"):
        Checkpoint.open("x.bin")
    assert not Path("ran").exists()


def test_a_truncated_archive(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(1000)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    for length in (len(content) - 40, len(content) // 2, 10):
        (tmp_path / "x.bin").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"x\.bin: truncated or damaged.*{length} bytes"):
            Checkpoint.open(tmp_path / "x.bin")


def test_a_file_of_old_torch_says_how_to_convert_it(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="convert it once"):
        Checkpoint.open(tmp_path / "x.bin")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2000)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as source, zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    with pytest.raises(CheckpointError, match="compressed"):
        Checkpoint.open(tmp_path / "y.bin")


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "x.bin")


def rebuilt(storage: torch.Tensor, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> object:
    """Pickled as a view of a storage, whatever the storage holds."""

    class View:
        def __reduce__(self) -> tuple[object, ...]:
            return torch._utils._rebuild_tensor_v2, (storage._typed_storage(), first, shape, strides, False, OrderedDict())

    return View()


@pytest.mark.parametrize(
    ("first", "shape", "strides"),
    [
        (0, (11,), (1,)),
        (1, (10,), (1,)),
        (-1, (2,), (1,)),
        (0, (2, 2), (9, 1)),
        (9, (3,), (-1,)),
        (0, (1 << 40, 1 << 40), (1, 1)),
        (1 << 62, (1,), (1,)),
    ],
)
def test_a_view_beyond_its_storage_is_refused(tmp_path: Path, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    storage = torch.arange(10.0)
    torch.save({"a": rebuilt(storage, 2, (4,), (2,)), "b": storage}, tmp_path / "good.bin")
    assert torch.equal(read(Checkpoint.open(tmp_path / "good.bin"), "a"), storage[2::2])
    torch.save({"a": rebuilt(storage, first, shape, strides), "b": storage}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"x\.bin: damaged"):
        Checkpoint.open(tmp_path / "x.bin")


def repacked(source: Path, target: Path, changed: dict[str, bytes | None], order: list[str] | None = None) -> None:
    """The archive as another program writes it: no alignment, records in another order, changed or missing."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        names = {name.partition("/")[2]: name for name in old.namelist()}
        for name in order or names:
            content = changed.get(name, old.read(names[name]))
            if content is not None:
                new.writestr(names[name], content)


def test_an_archive_that_another_program_has_packed(tmp_path: Path) -> None:
    state = {"a": torch.randn(7), "b": torch.randn(1000), "c": torch.randn(3)}
    torch.save(state, tmp_path / "x.bin")
    repacked(tmp_path / "x.bin", tmp_path / "y.bin", {}, ["data/2", "version", "data/0", "data.pkl", "data/1"])
    checkpoint = Checkpoint.open(tmp_path / "y.bin")
    for name, value in state.items():
        assert torch.equal(read(checkpoint, name), value)


@pytest.mark.parametrize("alignment", [1, 4096])
def test_records_of_another_alignment(tmp_path: Path, alignment: int) -> None:
    from torch.utils.serialization import config

    state = {"a": torch.randn(7), "b": torch.randn(1000), "c": torch.randn(3)}
    with config.patch("save.storage_alignment", alignment):
        torch.save(state, tmp_path / "x.bin")
    checkpoint = Checkpoint.open(tmp_path / "x.bin")
    for name, value in state.items():
        assert torch.equal(read(checkpoint, name), value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data/0": bytes(39)}, "its storage '0' is said to have 40 bytes, its record has 39"),
        ({"data/0": None}, "its record 'data/0' is missing"),
        ({"data.pkl": None}, "none of torch.save"),
        ({"data.pkl": b"nothing"}, "damaged|foreign"),
        ({"data.pkl": b""}, "damaged"),
        ({"byteorder": b"big"}, "another byte order"),
    ],
)
def test_records_that_contradict_each_other(tmp_path: Path, changed: dict[str, bytes | None], says: str) -> None:
    torch.save({"a": torch.randn(10)}, tmp_path / "x.bin")
    repacked(tmp_path / "x.bin", tmp_path / "y.bin", changed)
    with pytest.raises(CheckpointError, match=says) as error:
        Checkpoint.open(tmp_path / "y.bin")
    assert "y.bin" in str(error.value)


@pytest.mark.parametrize(("field", "value"), [(24, 1 << 30), (42, 1 << 30), (42, 7)], ids=["size", "far", "inside another"])
def test_a_directory_that_points_elsewhere(tmp_path: Path, field: int, value: int) -> None:
    torch.save({"a": torch.randn(1000)}, tmp_path / "x.bin")
    content = bytearray((tmp_path / "x.bin").read_bytes())
    place = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))
    content[place + field : place + field + 4] = value.to_bytes(4, "little")
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.bin: (truncated or )?damaged"):
        Checkpoint.open(tmp_path / "x.bin")


def test_tensors_of_any_device_are_found_without_it(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10.0)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as archive:
        text = archive.read("x/data.pkl")
    on_device = text.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
    assert on_device != text
    repacked(tmp_path / "x.bin", tmp_path / "y.bin", {"data.pkl": on_device})
    assert torch.equal(read(Checkpoint.open(tmp_path / "y.bin"), "a"), torch.arange(10.0))


def test_a_scripted_module_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="a TorchScript archive"):
        Checkpoint.open(tmp_path / "x.pt")


def test_tensors_without_bytes_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"a": torch.empty(3, device="meta")}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="'a' has no bytes in the archive"):
        Checkpoint.open(tmp_path / "x.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "q.bin")
    with pytest.raises(CheckpointError, match=r"q\.bin"):
        Checkpoint.open(tmp_path / "q.bin")


class Stream(io.RawIOBase):
    """Somewhere to write to from beginning to end, like a pipe: sizes can only be told behind what they are of."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, part: Any) -> int:
        self.content += bytes(part)
        return len(bytes(part))


@pytest.mark.parametrize("is_long", [False, True])
def test_archives_that_another_program_packed_anew(tmp_path: Path, is_long: bool) -> None:
    """Their records begin anywhere, a few of them where torch's would have begun."""
    state = {f"k{number}": torch.randn(3 + number) for number in range(20)}
    torch.save(state, tmp_path / "torch.bin")
    for shift in range(64):
        stream = Stream()
        with zipfile.ZipFile(tmp_path / "torch.bin") as archive, zipfile.ZipFile(stream, "w") as again:
            again.writestr("archive/" + "p" * shift + "x", b"q" * shift)
            for info in archive.infolist():
                with again.open(zipfile.ZipInfo(info.filename), "w", force_zip64=is_long) as record:
                    record.write(archive.read(info))
        file = tmp_path / f"{shift}.bin"
        file.write_bytes(stream.content)
        checkpoint = Checkpoint.open(file)
        for name, tensor in state.items():
            assert torch.equal(read(checkpoint, name), tensor), (shift, name)
