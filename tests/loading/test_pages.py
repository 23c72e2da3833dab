"""Tensors on mapped pages of files: which can be, what they cost, and what happens when a file changes under them."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bigmodel.devices import private_bytes
from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, CheckpointStore
from bigmodel.loading.entry import Packed
from bigmodel.loading.keys import Slice, Stack, Transpose, Whole
from bigmodel.loading.pages import MappedPages, _file_system, range_of
from bigmodel.loading.transfer import Transfer, lower
from bigmodel.protocols import PagedStore

MiB = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "float": torch.randn(8, 16),
        "half": torch.randn(6, 4).half(),
        "brain": torch.randn(4, 6, 2).bfloat16(),
        "flags": torch.randint(0, 2, (3, 5)).bool(),
        "scalar": torch.tensor(2.5).bfloat16(),
        "empty": torch.zeros(0, 3),
    }


def aligned(file: Path, values: dict[str, torch.Tensor], remainder: int = 0) -> Path:
    """A safetensors file whose bytes begin `remainder` bytes behind a multiple of 16."""
    for padding in range(0, 64, 8):
        save_file(values, file, {"padding": "." * padding} if padding else None)
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 16 == remainder:
            return file
    raise AssertionError("no padding gives this alignment")


def store_of(file: Path, sources: dict[str, object] | None = None, **arguments: bool) -> CheckpointStore:
    checkpoint = Checkpoint.open(file)
    entries = checkpoint.entries
    transfers = {
        name: lower(source, entries, name, dtype_of(source, entries))
        for name, source in (sources or {name: Whole(name) for name in entries}).items()
    }
    return CheckpointStore(transfers, checkpoint.identities, **arguments)


def dtype_of(source: object, entries: dict) -> torch.dtype:
    while not isinstance(source, Whole):
        source = source.sources[0] if isinstance(source, Stack) else source.source
    return entries[source.name].dtype


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return aligned(tmp_path / "model.safetensors", tensors())


def test_tensors_are_those_of_the_file(file):
    store = store_of(file)
    assert isinstance(store, PagedStore)
    names = [name for name in tensors() if name != "empty"]
    assert [name for name in tensors() if store.is_paged(name)] == names
    for name, value in zip(names, store.pages(names), strict=True):
        assert torch.equal(value, tensors()[name])
        assert value.shape == tensors()[name].shape
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_they_take_no_private_memory(tmp_path):
    file = aligned(tmp_path / "model.safetensors", {"weight": torch.ones(16 * MiB)})
    store = store_of(file)
    before = private_bytes()
    (weight,) = store.pages(["weight"])
    assert float(weight.sum()) == 16 * MiB
    assert private_bytes() - before < 4 * MiB


def test_slices_of_a_tensor_can_be_mapped_and_what_has_to_be_put_together_cannot(file):
    store = store_of(
        file,
        {
            "rows": Slice(Whole("float"), 0, 2, 3),
            "columns": Slice(Whole("float"), 1, 4, 4),
            "turned": Transpose(Whole("float"), 0, 1),
            "stacked": Stack((Whole("half"), Whole("half")), 0),
        },
    )
    assert [name for name in store.names() if store.is_paged(name)] == ["rows"]
    assert torch.equal(store.pages(["rows"])[0], tensors()["float"][2:5])


def test_other_dtypes_are_not_mapped(file):
    entries = Checkpoint.open(file).entries
    store = CheckpointStore({"float": lower(Whole("float"), entries, "float", torch.float16)})
    assert not store.is_paged("float")


def test_numbers_of_four_bytes_are_mapped_where_kernels_give_the_same_bits(tmp_path):
    store = store_of(aligned(tmp_path / "model.safetensors", tensors(), remainder=8))
    assert store.is_paged("half")
    assert store.is_paged("brain")
    assert not store.is_paged("float")


def test_the_switch(file, monkeypatch):
    assert not store_of(file, map_files=False).is_paged("float")
    monkeypatch.setenv("BIGMODEL_MAP_FILES", "0")
    assert not store_of(file).is_paged("float")
    assert store_of(file, map_files=True).is_paged("float")
    monkeypatch.setenv("BIGMODEL_MAP_FILES", "yes")
    assert store_of(file).is_paged("float")


def test_only_local_file_systems_by_default(file, monkeypatch):
    import bigmodel.loading.pages as pages

    monkeypatch.setattr(pages, "_is_local", lambda folder: False)
    assert not store_of(file).is_paged("float")
    monkeypatch.setenv("BIGMODEL_MAP_FILES", "1")
    assert store_of(file).is_paged("float")


def test_the_file_system_of_a_folder():
    mounts = [("/", "ext4"), ("/home", "nfs4"), ("/home/me/fast", "XFS"), ("/mnt", "ext4"), ("/mnt", "fuse.sshfs")]
    for folder, kind in {"/": "ext4", "/homes": "ext4", "/home/me": "nfs4", "/home/me/fast/x": "xfs", "/mnt/x": "fuse.sshfs"}.items():
        assert _file_system(folder, mounts) == kind
    assert _file_system("relative", mounts) == ""


def test_a_file_system_that_cannot_map(file, monkeypatch):
    import bigmodel.loading.pages as pages

    def refuse(descriptor: int) -> None:
        raise OSError("no mapping here")

    monkeypatch.setattr(pages, "map_privately", refuse)
    assert not store_of(file).is_paged("float")


@pytest.mark.parametrize("change", ["cut short", "written to", "longer"])
def test_a_file_that_has_changed_is_refused(file, change):
    store = store_of(file)
    store.pages(["float"])
    data = file.read_bytes()
    with file.open("r+b") as stream:
        if change == "cut short":
            stream.truncate(16)
        else:
            stream.seek(0, os.SEEK_END if change == "longer" else os.SEEK_SET)
            stream.write(data)
    os.utime(file, ns=(1, 1))
    for ask in (store.pages, store.absent_pages):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: the file has changed"):
            ask(["float"])


def test_a_file_that_is_replaced_or_gone_goes_on_to_give_what_it_held(file):
    store = store_of(file)
    store.pages(["float"])
    file.unlink()
    assert torch.equal(store.pages(["float"])[0], tensors()["float"])


def test_what_is_written_stays_private_until_the_store_is_told(file):
    store = store_of(file)
    (weight,) = store.pages(["float"])
    weight.mul_(2)
    assert torch.equal(store_of(file).pages(["float"])[0], tensors()["float"])
    assert torch.equal(load_file(file)["float"], tensors()["float"])
    store.write("float", weight)
    assert not store.is_paged("float")
    assert torch.equal(store.pages(["half"])[0], tensors()["half"])
    assert torch.equal(weight, tensors()["float"] * 2)


def test_pages_next_to_what_was_written_are_those_of_the_file_again(file):
    store = store_of(file)
    weight, half = store.pages(["float", "half"])
    weight.zero_()
    half.zero_()
    store.write("float", weight)
    assert torch.equal(store.pages(["half"])[0], tensors()["half"])


def test_copies_have_pages_of_their_own(file):
    store = store_of(file)
    (weight,) = store.pages(["float"])
    weight.zero_()
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert torch.equal(twin.pages(["float"])[0], tensors()["float"])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied here")
def test_what_is_not_in_memory_is_read(tmp_path):
    file = aligned(tmp_path / "model.safetensors", {"weight": torch.ones(4 * MiB), "other": torch.ones(8)})
    store = store_of(file)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read = store.absent_pages(["weight", "other"])
    if read is None:
        pytest.skip("this file system keeps everything in memory")
    read()
    assert store.absent_pages(["weight", "other"]) is None
    assert float(store.pages(["weight"])[0].sum()) == 4 * MiB


@pytest.mark.parametrize("error", [OSError("unsupported"), BlockingIOError()])
def test_where_the_system_does_not_say_what_is_in_memory_it_is_read_once(file, monkeypatch, error):
    real, offsets = os.preadv, []

    def preadv(descriptor: int, buffers: list, offset: int, flags: int = 0) -> int:
        if flags:
            raise error
        offsets.append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    store = store_of(file)
    for _ in range(3):
        read = store.absent_pages(["float"])
        if read is not None:
            read()
    assert len(offsets) == (3 if isinstance(error, BlockingIOError) else 1)


def test_transfers_that_cannot_be_mapped_are_nothing_to_read(file):
    pages = MappedPages(store_of(file)._reader.files)
    assert pages.absent([Transfer("empty", (0,), torch.float32, ())]) is None


def test_entries_whose_bytes_are_not_their_values_are_not_mapped(file):
    entry = Checkpoint.open(file).entries["float"]
    whole = lower(Whole("float"), {"float": entry}, "float", torch.float32)
    packed = replace(entry, contents=Packed("rows", 64, lambda rows: rows))
    assert range_of(whole) == (file, entry.offset)
    assert range_of(replace(whole, pieces=(replace(whole.pieces[0], origin=packed),))) is None
