"""Files of torch.save: entries inside the archive, whatever views the tensors are; nothing is unpickled that could run code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

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
