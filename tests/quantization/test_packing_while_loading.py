"""Weights are packed as they are read: bit for bit as bitsandbytes packs them whole, and in little memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, Renamed, load
from bigmodel.loading import packing as packing_room
from bigmodel.protocols import Read
from bigmodel.quantization import FourBit, Int8, WeightPacker, pack, select

FORMATS = [FourBit("nf4"), FourBit("fp4", double_quant=True), FourBit("nf4", storage=torch.float16), Int8()]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 48)
        self.layers = nn.ModuleList([nn.Linear(48, 100), nn.Linear(100, 48, bias=False), nn.Linear(48, 7)])
        self.head = nn.Linear(7, 20)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    state = {name: torch.randn_like(value).to(torch.bfloat16) for name, value in Model().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    return state, tmp_path


def empty() -> nn.Module:
    with torch.device("meta"):
        return Model().to(torch.bfloat16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bytes are equal: packed bytes that are kept as floats may be NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def packer_for(model: nn.Module, packing) -> WeightPacker:
    return WeightPacker(packing, select(model).packed)


@pytest.mark.parametrize("packing", FORMATS)
@pytest.mark.parametrize("part_bytes", [1, 1000, 1 << 20])
def test_parts_of_any_size_give_the_same_bytes(saved, monkeypatch, packing, part_bytes):
    monkeypatch.setattr(packing_room, "PART_BYTES", part_bytes)
    state, folder = saved
    model = empty()
    report = load(model, Checkpoint.open(folder), {"": "cpu"}, packer=packer_for(model, packing))
    assert sorted(report.packed) == [f"layers.{n}.weight" for n in range(3)]
    for name, kept in report.packed.items():
        assert (kept.spec.shape, kept.spec.dtype) == (tuple(state[name].shape), torch.bfloat16)
        prefix = name.removesuffix("weight")
        expected = pack(state[name], packing)
        assert sorted(kept.tensors) == sorted(prefix + part for part in expected)
        for part, tensor in expected.items():
            assert same(kept.tensors[prefix + part], tensor), part
    assert torch.equal(model.embed.weight, state["embed.weight"])
    assert torch.equal(model.layers[0].bias, state["layers.0.bias"])
    assert model.layers[0].weight.is_meta  # what is kept is the caller's to put in
    assert report.bytes_read == sum(tensor.nbytes for tensor in state.values())
    assert report.device_bytes["cpu"] == sum(
        sum(tensor.nbytes for tensor in report.packed[name].tensors.values()) if name in report.packed else state[name].nbytes
        for name in state
    )


def test_weights_come_through_key_rules(saved):
    state, folder = saved
    save_file({f"net.{name}": value for name, value in state.items()}, folder / "model.safetensors")
    model = empty()
    report = load(model, Checkpoint.open(folder), rules=Renamed(strip_prefix="net."), packer=packer_for(model, FORMATS[0]))
    assert torch.equal(report.packed["layers.1.weight"].tensors["layers.1.weight"], pack(state["layers.1.weight"], FORMATS[0])["weight"])


@pytest.mark.parametrize("packing", FORMATS)
@pytest.mark.parametrize("named", [False, True])
def test_packed_weights_rest_on_disk_and_are_read_from_there(saved, tmp_path, packing, named):
    state, folder = saved
    model = empty()
    file = tmp_path / "kept" / "packed.safetensors" if named else None
    devices = {"": "cpu", "layers.1": "disk", "layers.2": "disk"}
    report = load(model, Checkpoint.open(folder), devices, packer=packer_for(model, packing), packed_file=file)
    assert report.store is not None
    expected = pack(state["layers.1.weight"], packing)
    for part, tensor in expected.items():
        assert report.packed["layers.1.weight"].tensors[f"layers.1.{part}"].is_meta
        value = torch.empty_like(tensor)
        report.store.read_into([Read(f"layers.1.{part}", value)])
        assert same(value, tensor)
    assert same(report.packed["layers.0.weight"].tensors["layers.0.weight"], pack(state["layers.0.weight"], packing)["weight"])
    assert named == (file is not None and file.is_file())


def test_a_private_file_goes_with_the_store(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = empty()
    report = load(model, Checkpoint.open(saved[1]), {"": "disk"}, packer=packer_for(model, FORMATS[0]))
    (folder,) = tmp_path.glob("bigmodel-*")
    assert [each.name for each in folder.iterdir()] == ["packed.safetensors"]
    del report
    assert not folder.exists()


@pytest.mark.parametrize("packing", FORMATS)
def test_a_second_load_reads_what_the_first_has_kept(saved, tmp_path, packing):
    file = tmp_path / "kept.safetensors"
    first, second = (
        load(model, Checkpoint.open(saved[1]), {"": "cpu", "layers.2": "disk"}, packer=packer_for(model, packing), packed_file=file)
        for model in (empty(), empty())
    )
    for name in ("layers.0.weight", "layers.1.weight"):
        for each, tensor in first.packed[name].tensors.items():
            assert same(second.packed[name].tensors[each], tensor)
    assert all(tensor.is_meta for tensor in second.packed["layers.2.weight"].tensors.values())
    assert second.bytes_read < first.bytes_read


def test_a_kept_file_of_another_packing_is_written_anew(saved, tmp_path):
    file = tmp_path / "kept.safetensors"
    for packing in (Int8(), FourBit("nf4")):
        model = empty()
        report = load(model, Checkpoint.open(saved[1]), packer=packer_for(model, packing), packed_file=file)
        assert set(Checkpoint.open(file).entries) == {name for kept in report.packed.values() for name in kept.tensors}


def test_a_load_that_fails_leaves_no_file_and_no_change(saved, tmp_path, monkeypatch):
    model = empty()
    file = tmp_path / "new" / "kept.safetensors"
    checkpoint = Checkpoint.open(saved[1])
    with open(saved[1] / "model.safetensors", "r+b") as stream:
        stream.truncate(2000)
    with pytest.raises(CheckpointError):
        load(model, checkpoint, packer=packer_for(model, FORMATS[0]), packed_file=file)
    assert not file.parent.exists()
    assert all(tensor.is_meta for tensor in model.parameters())
