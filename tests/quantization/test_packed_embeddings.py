"""Embedding tables that are packed because they were asked to be: values, places, bytes, files, what is refused."""

from __future__ import annotations

import copy

import bitsandbytes
import pytest
import torch
from quantized_models import TOKENS, Net, empty_net, saved_net
from torch import nn

from bigmodel import MatchError, QuantizationError, load_checkpoint_and_dispatch, placement, quantization_report, save_model
from bigmodel.loading.store import CheckpointStore
from bigmodel.planning import plan
from bigmodel.quantization import (
    BnbQuantizationConfig,
    FourBit,
    Int8,
    PackedEmbedding,
    kernels,
    pack,
    packed_layers,
    replace_with_bnb_layers,
    scheme_of,
    select,
)

FORMATS = [
    FourBit("nf4"),
    FourBit("fp4", double_quant=True),
    FourBit("nf4", storage=torch.bfloat16),
    Int8(),
]
CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    "nf4-dq": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bf16",
        "torch_dtype": "fp32",
    },
    "int8": {"load_in_8bit": True, "torch_dtype": "fp32"},
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return BnbQuantizationConfig(**CONFIGS[request.param], pack_embeddings=True)


def packed_table(table: nn.Embedding, packing) -> PackedEmbedding:
    result = PackedEmbedding(tuple(table.weight.shape), packing, table.weight.dtype)
    made = pack(table.weight, packing)
    result.fill({name: made[name].view(spec.shape) for name, spec in result.specs().items()})
    return result


def whole(table: nn.Embedding, packing) -> torch.Tensor:
    """All rows, unpacked at once."""
    made = pack(table.weight, packing)
    return packing.unpack(made, tuple(table.weight.shape), table.weight.dtype)


@pytest.mark.parametrize("packing", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(100, 64), (32, 256), (64, 48), (32, 110), (16, 4), (64, 65), (128, 1)])
def test_rows_are_those_of_the_whole_table_unpacked(packing, dtype, shape):
    torch.manual_seed(0)
    table = nn.Embedding(*shape, dtype=dtype)
    packed = packed_table(table, packing)
    ids = torch.tensor([[0, 3, 3], [shape[0] - 1, 1, 0]])
    expected = whole(table, packing)
    assert torch.equal(packed(ids), expected[ids])
    assert torch.equal(packed(torch.arange(shape[0])), expected)
    assert torch.equal(packed.unpacked(), expected)
    assert packed(torch.tensor(2)).shape == (shape[1],)
    assert packed(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, shape[1])
    assert torch.equal(packed(ids.int()), expected[ids])
    assert torch.equal(copy.deepcopy(packed)(ids), expected[ids])


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("width", [64, 128])
def test_rows_are_those_of_bitsandbytes(kind, width):
    torch.manual_seed(0)
    table = nn.Embedding(50, width)
    kinds = {"int8": bitsandbytes.nn.Embedding8bit, "nf4": bitsandbytes.nn.EmbeddingNF4, "fp4": bitsandbytes.nn.EmbeddingFP4}
    theirs = kinds[kind](50, width)
    theirs.load_state_dict(table.state_dict())
    theirs = theirs.to("cpu")
    ids = torch.arange(50)
    assert torch.allclose(packed_table(table, Int8() if kind == "int8" else FourBit(kind))(ids), theirs(ids), rtol=1e-6, atol=0)


def test_a_lookup_unpacks_its_rows_and_no_others(monkeypatch):
    unpacked = []
    original = kernels.kernels.dequantize_4bit

    def counted(packed, state, *rest, **named):
        unpacked.append(2 * packed.numel())
        return original(packed, state, *rest, **named)

    monkeypatch.setattr(kernels.kernels, "dequantize_4bit", counted)
    table = packed_table(nn.Embedding(1024, 128), FourBit("nf4"))
    table(torch.tensor([5, 900]))
    assert unpacked == [2 * 128]


def test_ids_outside_the_table_are_refused():
    table = packed_table(nn.Embedding(16, 64), FourBit("nf4"))
    for wrong in (16, -1):
        with pytest.raises(IndexError):
            table(torch.tensor([0, wrong]))
    ragged = packed_table(nn.Embedding(64, 33), FourBit("nf4"))
    with pytest.raises(IndexError):
        ragged(torch.tensor([64]))


def reference(net: nn.Module, config: BnbQuantizationConfig) -> nn.Module:
    """The net, packed where it is, with the values of the packed table in a plain one."""
    packing = scheme_of(config).format
    net = copy.deepcopy(net)
    table = nn.Embedding(*net.embed.weight.shape)
    table.weight.data = whole(net.embed, packing)
    config = copy.copy(config)
    config.pack_embeddings = False
    net = replace_with_bnb_layers(net, config)
    net.embed = table
    return net.eval()


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).cpu()


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "embed": "disk", "layers.1": "disk"}, {"": "disk"}, "auto"])
def test_models_compute_with_the_unpacked_values_wherever_tables_rest(tmp_path, config, device_map):
    net = saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=config)
    assert type(model.embed) is PackedEmbedding
    for _ in range(2):
        assert torch.equal(output(model), output(reference(net, config)))
    assert not placement(model).outside_reads


def test_a_table_that_rests_is_read_by_rows(tmp_path, accelerators, config, monkeypatch):
    accelerators(1, check_leaks=False)  # bitsandbytes keeps small tables on each device
    net = saved_net(tmp_path)
    device_map = {"embed": "disk", "layers": "cpu", "head": 0}  # packed on the CPU: codes of scales on a tie may differ elsewhere
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=config)
    rows, wholes = [], []
    by_rows, at_once = CheckpointStore.read_rows, CheckpointStore.read_into
    monkeypatch.setattr(CheckpointStore, "read_rows", lambda store, name, *rest: (rows.append(name), by_rows(store, name, *rest))[1])
    monkeypatch.setattr(
        CheckpointStore, "read_into", lambda store, reads: (wholes.extend(each.name for each in reads), at_once(store, reads))[1]
    )
    assert torch.equal(output(model), output(reference(net, config)))
    assert "embed.weight" in rows
    assert not {"embed.weight", "embed.absmax", "embed.SCB"} & set(wholes)


def test_planned_bytes_are_the_loaded_ones(tmp_path, config):
    saved_net(tmp_path)
    packing = scheme_of(config).format
    planned = plan(empty_net(), {"cpu": "1GB"}, dtype=config.torch_dtype, weight_format=packing)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=planned, quantization=config)
    assert planned.total_bytes == sum(tensor.untyped_storage().nbytes() for tensor in model.parameters())
    (row,) = [row for row in quantization_report(model, tmp_path).layers if row.name == "embed"]
    assert (row.format, row.unpacked_bytes) == (packing.name, 100 * 64 * 4)
    assert 0 < row.relative_error < 0.2


def test_packed_tables_are_saved_loaded_and_kept(tmp_path, config):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(
        empty_net(), tmp_path, device_map={"": "cpu", "layers.1": "disk"}, quantization=config, packed_cache=tmp_path / "kept"
    )
    (file,) = (tmp_path / "kept").iterdir()
    before = file.stat().st_mtime_ns
    again = load_checkpoint_and_dispatch(
        empty_net(), tmp_path, device_map={"": "cpu", "embed": "disk"}, quantization=config, packed_cache=tmp_path / "kept"
    )
    assert file.stat().st_mtime_ns == before
    assert torch.equal(output(again), output(model))
    save_model(model, tmp_path / "packed")
    save_model(again, tmp_path / "packed-from-disk")
    for folder in ("packed", "packed-from-disk"):
        for device_map in ({"": "cpu"}, {"": "cpu", "embed": "disk"}):
            loaded = load_checkpoint_and_dispatch(empty_net(), tmp_path / folder, device_map=device_map, quantization=config)
            assert sorted(packed_layers(loaded)) == sorted(packed_layers(model))
            assert torch.equal(output(loaded), output(model))
    half = copy.copy(config)
    half.torch_dtype = torch.float16
    in_half = load_checkpoint_and_dispatch(empty_net(), tmp_path / "packed", device_map={"": "cpu"}, quantization=half)
    assert in_half.embed(TOKENS).dtype == in_half.head.weight.dtype == torch.float16
    fresh = empty_net()
    fresh.embed = nn.Embedding(100, 32, device="meta")
    with pytest.raises(MatchError, match=r"embed\.weight"):
        load_checkpoint_and_dispatch(fresh, tmp_path / "packed", device_map={"": "cpu"})
    assert type(fresh.embed) is nn.Embedding


def test_a_state_dict_goes_around_and_casts_are_about_the_rows(config):
    torch.manual_seed(0)
    model = replace_with_bnb_layers(Net(), config)
    twin = replace_with_bnb_layers(Net(), config)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(output(twin), output(model))
    assert model.embed.half()(TOKENS).dtype == torch.float16
    assert model.embed.weight.dtype == twin.embed.weight.dtype
    with pytest.raises(QuantizationError, match="cannot be trained"):
        model.embed.requires_grad_(True)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_table_is_refused_by_name_and_stays_where_it_is_skipped(tmp_path, config):
    model = Tied()
    with pytest.raises(QuantizationError, match=r"embedding 'embed' .* tied to that of 'head'.*skip_modules=\['embed', …\]"):
        replace_with_bnb_layers(model, config)
    with pytest.raises(QuantizationError, match="'embed'"):
        plan(model, {"cpu": "1GB"}, weight_format=scheme_of(config).format)
    assert not packed_layers(model)
    config.skip_modules = ["embed"]
    assert sorted(packed_layers(replace_with_bnb_layers(model, config))) == sorted(
        f"layers.{n}.{name}" for n in range(4) for name in ("up", "down")
    )
    assert model.head.weight is model.embed.weight


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (Scaled(16, 64), "Scaled has a forward of its own"),
        (nn.Embedding(16, 64, max_norm=1.0), "rewrites its rows"),
        (nn.Embedding(3, 7), "no single rows can be unpacked of its shape [3, 7]"),
    ],
)
def test_tables_that_cannot_be_are_left_and_say_why(table, why):
    model = nn.ModuleDict({"table": table, "layer": nn.Linear(64, 64), "head": nn.Linear(64, 8)})
    packing = FourBit("nf4")
    left = select(model, takes_table=lambda shape: packing.table(shape) is not None).left
    assert why in left["table"]


def test_tables_stay_unless_they_were_asked_for(tmp_path):
    net = saved_net(tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=config)
    assert torch.equal(model.embed.weight, net.embed.weight)
    with pytest.raises(QuantizationError, match="pack_embeddings must be a bool; it is 1"):
        BnbQuantizationConfig(load_in_8bit=True, pack_embeddings=1)
