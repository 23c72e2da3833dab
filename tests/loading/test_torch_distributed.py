"""Folders of torch.distributed.checkpoint: every tensor in place, from its chunks; nothing foreign is unpickled."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from bigmodel.errors import CheckpointError, CheckpointNotFoundError
from bigmodel.loading import Checkpoint, Renamed, load, load_checkpoint_in_model, load_state_dict


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(64, 48, generator=generator),
        "bias": torch.randn(64, generator=generator).bfloat16(),
        "turned": torch.arange(12).view(3, 4).t(),
        "part": torch.randn(10, 6, generator=generator)[2:5, 1:4],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3.5),
        "truth": torch.tensor([True, False]),
    }


def save(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=str(folder), no_dist=True)
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    from bigmodel.loading import Reader, Whole
    from bigmodel.loading.transfer import lower

    checkpoint = Checkpoint.open(folder)
    jobs = []
    for name, entry in checkpoint.entries.items():
        jobs.append((lower(Whole(name), checkpoint.entries, name, entry.dtype), torch.empty(entry.shape, dtype=entry.dtype)))
    Reader(checkpoint.identities).read(jobs)
    return {transfer.target: tensor for transfer, tensor in jobs}


def edited(folder: Path, edit: Callable[[Metadata], None]) -> None:
    metadata = FileSystemReader(str(folder)).read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def split(folder: Path, name: str, pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Makes the tensor `name` one of several chunks, each with a file of its own, as several ranks save it."""
    whole = state()[name]

    def edit(metadata: Metadata) -> None:
        found = metadata.state_dict_metadata[name]
        metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn != name}
        found.chunks = []
        for number, (start, shape) in enumerate(pieces):
            chunk = whole[tuple(slice(low, low + length) for low, length in zip(start, shape, strict=True))].clone()
            other = save(folder.parent / f"{folder.name}-{name}-{number}", {"x": chunk})
            os.replace(other / "__0_0.distcp", folder / f"__{number + 1}_0.distcp")
            (place,) = FileSystemReader(str(other)).read_metadata().storage_data.values()
            place.relative_path = f"__{number + 1}_0.distcp"
            metadata.storage_data[MetadataIndex(name, start, number)] = place
            found.chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(shape)))

    edited(folder, edit)


def test_every_tensor_is_read_as_it_was_saved_and_other_things_are_passed_over(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", {"model": state(), "step": 3, "lr": [1.0]})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.format == "torch.distributed"
    assert set(checkpoint.files) == {folder / ".metadata", folder / "__0_0.distcp"}
    found = read(folder)
    assert found.keys() == {f"model.{name}" for name in state()}
    for name, value in state().items():
        assert torch.equal(found[f"model.{name}"], value)
        assert found[f"model.{name}"].dtype == value.dtype


def test_chunks_of_several_ranks_become_one_tensor(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", state())
    split(folder, "weight", [((0, 0), (20, 48)), ((20, 0), (44, 16)), ((20, 16), (44, 32))])
    assert torch.equal(read(folder)["weight"], state()["weight"])
    assert Checkpoint.open(folder).total_bytes == sum(value.nbytes for value in state().values())


def test_a_model_is_filled_and_its_disk_tier_reads_the_chunks(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", {"model": {name: value for name, value in state().items() if name in ("weight", "bias")}})
    with torch.device("meta"):
        model = nn.Linear(48, 64)
    load(model, Checkpoint.open(folder), rules=Renamed(strip_prefix="model."))
    assert torch.equal(model.weight, state()["weight"])
    assert torch.equal(model.bias, state()["bias"].float())
    report = load(model, Checkpoint.open(folder), {"": "disk"}, rules=Renamed(strip_prefix="model."))
    assert report.store is not None
    row = torch.empty(1, 48)
    report.store.read_rows("weight", torch.tensor([7]), row)
    assert torch.equal(row[0], state()["weight"][7])


def test_an_offload_folder_points_into_it(tmp_path: Path) -> None:
    from bigmodel.loading import OffloadedWeightsLoader

    folder = save(tmp_path / "saved", {name: value for name, value in state().items() if name in ("weight", "bias")})
    split(folder, "weight", [((0, 0), (20, 48)), ((20, 0), (44, 48))])
    with torch.device("meta"):
        model = nn.Linear(48, 64)
    load_checkpoint_in_model(model, folder, {"": "disk"}, offload_folder=tmp_path / "off")
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path / "off")["weight"], state()["weight"])


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def test_nothing_foreign_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "saved", state())
    edited(folder, lambda metadata: setattr(metadata, "planner_data", Foreign()))
    with pytest.raises(CheckpointError, match=r"not unpickled since that could run foreign code.*mkdir"):
        Checkpoint.open(folder)
    assert not (tmp_path / "was-run").exists()


def shift(metadata: Metadata) -> None:
    next(place for index, place in metadata.storage_data.items() if index.fqn == "weight").offset += 3


def escape(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../outside"


def compress(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


def grow(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([65, 48])


def overlap(metadata: Metadata) -> None:
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "weight")
    metadata.storage_data[MetadataIndex("weight", (0, 1), 1)] = place
    metadata.state_dict_metadata["weight"].size = torch.Size([64, 96])
    metadata.state_dict_metadata["weight"].chunks.append(ChunkStorageMetadata(torch.Size([0, 1]), torch.Size([64, 48])))


def lose(metadata: Metadata) -> None:
    metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn != "weight"}


def retype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].properties.dtype = torch.float64


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (shift, "no tensor at byte"),
        (escape, "outside its folder"),
        (compress, "is compressed"),
        (grow, "'weight' has 3120 elements, its chunks hold 3072"),
        (overlap, "chunks of 'weight' overlap"),
        (lose, "its chunks hold 0"),
        (retype, "torch.float32; the table says .* torch.float64"),
        (lambda metadata: setattr(metadata, "storage_data", None), "not a table"),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, edit: Callable[[Metadata], None], says: str) -> None:
    folder = save(tmp_path / "saved", state())
    edited(folder, edit)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(folder)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", state())
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-50])
    with pytest.raises(CheckpointError, match=r"truncated: expected at least \d+ bytes for .*, found \d+"):
        Checkpoint.open(folder)
    data.unlink()
    with pytest.raises(CheckpointNotFoundError, match="which cannot be opened"):
        Checkpoint.open(folder)
    for wrong in (b"", b"nothing", pickle.dumps({"a": 1}), pickle.dumps(3)[:-1]):
        (folder / ".metadata").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            Checkpoint.open(folder)


def test_load_state_dict_is_for_single_files(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, OSError)):
        load_state_dict(save(tmp_path / "saved", state()))
