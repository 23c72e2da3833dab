"""Formats besides bitsandbytes': 8-bit floats in blocks, and torchao's. Values, bytes, files."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from quantized_models import TOKENS, Net, empty_net, saved_net
from safetensors.torch import load_file, save_file
from torch import nn

import bigmodel.loading.packing as packing_room
from bigmodel import QuantizationError, load_and_quantize_model, load_checkpoint_and_dispatch, placement, quantization_report, save_model
from bigmodel.errors import CheckpointError
from bigmodel.planning import plan
from bigmodel.protocols import TensorSpec
from bigmodel.quantization import PackedStack, pack, packed_layers, replace_with_bnb_layers, weight_format
from bigmodel.quantization.fp8_blocks import BLOCK, Fp8Blocks
from bigmodel.quantization.torchao_rows import TorchaoRows

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
with_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
NAMES = ["fp8", pytest.param("torchao-int8", marks=with_torchao), pytest.param("torchao-float8", marks=with_torchao)]


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).cpu()


def unpacked_net(net: nn.Module, model: nn.Module) -> nn.Module:
    """A net whose plain layers hold what the packed ones of `model` stand for."""
    twin = Net().eval()
    twin.load_state_dict(net.state_dict())
    for name, layer in packed_layers(model).items():
        twin.get_submodule(name).weight.data = layer.unpacked().float()
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 256), (300, 130), (1, 1), (129, 5)])
def test_blocks_of_8bit_floats_are_the_values_over_their_scales(shape, dtype):
    torch.manual_seed(0)
    value = torch.randn(shape).to(dtype)
    value[: shape[0] // 2] *= 1000
    made = pack(value, Fp8Blocks())
    for row in range(0, shape[0], BLOCK):
        for column in range(0, shape[1], BLOCK):
            block = value[row : row + BLOCK, column : column + BLOCK].float()
            scale = block.abs().max() / 448
            assert made["weight_scale_inv"][row // BLOCK, column // BLOCK] == scale
            assert torch.equal(
                made["weight"][row : row + BLOCK, column : column + BLOCK].float(), (block / scale).to(torch.float8_e4m3fn).float()
            )
    found = Fp8Blocks().unpack(made, shape, torch.float32)
    assert (found - value.float()).norm() / value.float().norm() < 0.04
    zero = pack(torch.zeros(shape), Fp8Blocks())
    assert torch.equal(Fp8Blocks().unpack(zero, shape, dtype), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(96, 64), (5, 200, 70), (4, 256, 64)])
@pytest.mark.parametrize("part_bytes", [1, 40_000, 1 << 22])
def test_parts_of_any_size_give_the_same_bytes(name, shape, part_bytes, tmp_path, monkeypatch):

    monkeypatch.setattr(packing_room, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    packing = weight_format(name)
    value = torch.randn(shape).to(torch.bfloat16)
    expected = pack(value, packing)
    assert packing.packed_bytes(TensorSpec(shape, torch.bfloat16)) == sum(each.nbytes for each in expected.values())
    assert {key: (tuple(each.shape), each.dtype) for key, each in expected.items()} == {
        key: (spec.shape, spec.dtype) for key, spec in packing.tensors(shape).items()
    }
    if len(shape) == 2:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(*shape[::-1], bias=False), nn.Linear(shape[0], 3)).to(torch.bfloat16)
        tensors = {"0.weight": value, "1.weight": torch.randn(3, shape[0]), "1.bias": torch.randn(3)}
        save_file(tensors, tmp_path / "model.safetensors")
        load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"}, quantization=name)
        assert all(torch.equal(each, expected[key]) for key, each in model[0].packed_tensors().items())
        return
    stack = PackedStack(shape, packing, torch.bfloat16)
    stack.fill(expected)
    for number in range(shape[0]):
        alone = packing.unpack(pack(value[number], packing), shape[1:], torch.bfloat16)
        assert torch.equal(stack[number], alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device_map", [{"": "cpu"}, None, {"": "cpu", "layers.0": "disk", "layers.2": "disk"}, {"": "disk"}])
def test_models_compute_wherever_weights_rest(tmp_path, name, device_map):
    net = saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=name)
    assert sorted(packed_layers(model)) == sorted(f"layers.{n}.{part}" for n in range(4) for part in ("up", "down"))
    resident = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=name)
    assert torch.equal(output(model), output(resident))
    reference = output(unpacked_net(net, resident))
    if name == "fp8":
        assert torch.equal(output(model), reference)
    assert torch.nn.functional.cosine_similarity(output(model), reference, dim=-1).min() > 0.9999
    assert torch.nn.functional.cosine_similarity(output(model), output(net), dim=-1).min() > 0.99
    assert (model.is_loaded_in_4bit, model.is_loaded_in_8bit) == (False, False)


@pytest.mark.parametrize("name", NAMES)
def test_packed_bytes_travel_to_accelerators(tmp_path, accelerators, name):
    accelerators(1, check_leaks=False)
    saved_net(tmp_path)
    device_map = {"embed": 0, "layers.0": 0, "layers.1": "cpu", "layers.2": "disk", "layers.3": "cpu", "head": 0}
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=name)
    resident = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=name)
    assert torch.allclose(output(model), output(resident), atol=1e-5)
    assert not placement(model).outside_reads


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_exact_and_files_go_around(tmp_path, name):
    saved_net(tmp_path)
    packing = weight_format(name)
    planned = plan(empty_net(), {"cpu": "1GB"}, weight_format=packing)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=planned, quantization=name, packed_cache=tmp_path / "kept")
    assert planned.total_bytes == sum(each.untyped_storage().nbytes() for each in model.parameters())
    (file,) = (tmp_path / "kept").iterdir()
    written = file.stat().st_mtime_ns
    again = load_checkpoint_and_dispatch(
        empty_net(), tmp_path, device_map={"": "cpu", "layers.1": "disk"}, quantization=name, packed_cache=tmp_path / "kept"
    )
    assert file.stat().st_mtime_ns == written
    assert torch.equal(output(again), output(model))
    assert {row.format for row in quantization_report(again, tmp_path).layers} == {name, ""}
    save_model(again, tmp_path / "saved")
    loaded = load_checkpoint_and_dispatch(empty_net(), tmp_path / "saved", device_map={"": "cpu", "layers.0": "disk"}, quantization=name)
    assert torch.equal(output(loaded), output(model))
    assert sorted(packed_layers(loaded)) == sorted(packed_layers(model))
    twin = replace_with_bnb_layers(Net(), name)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(output(twin.eval()), output(model))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_inputs_and_casts_leave_packed_bytes(name):
    torch.manual_seed(0)
    model = replace_with_bnb_layers(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)), name)
    layer = model[0]
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 32) @ layer.unpacked().float())
    dtype = layer.weight.dtype
    assert model.half()[0].weight.dtype == dtype
    assert layer(x.detach().half()).dtype == torch.float16
    with pytest.raises(QuantizationError, match="cannot be trained"):
        layer.requires_grad_(True)


@with_torchao
@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_bytes_are_those_of_torchao(kind, dtype):
    import torchao.quantization as torchao

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 4)).to(dtype)
    ours = replace_with_bnb_layers(nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 4)).to(dtype), f"torchao-{kind}")
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    ours = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 4)).to(dtype)
    ours[0].weight.data, ours[0].bias.data = weight, bias
    ours = replace_with_bnb_layers(ours, f"torchao-{kind}")
    config = torchao.Int8WeightOnlyConfig() if kind == "int8" else torchao.Float8WeightOnlyConfig()
    torchao.quantize_(model, config, filter_fn=lambda module, name: name == "0")
    x = torch.randn(5, 96).to(dtype)
    with torch.no_grad():
        assert torch.equal(ours[0](x), model[0](x))
        assert torch.equal(ours[0].unpacked(), model[0].weight.dequantize())
    assert torch.equal(ours[0].weight.view(torch.uint8), model[0].weight.qdata.view(torch.uint8))


def fp8_checkpoint(folder, net, *, prefix=""):
    """The net's checkpoint with its blocks' weights in 8-bit floats, as DeepSeek's; and the values that it stands for."""
    tensors, values = {}, dict(net.state_dict())
    for name, value in net.state_dict().items():
        if name.startswith("layers") and name.endswith(("up.weight", "down.weight")):
            made = pack(value, Fp8Blocks())
            tensors[prefix + name] = made["weight"]
            tensors[f"{prefix}{name}_scale_inv"] = made["weight_scale_inv"]
            values[name] = Fp8Blocks().unpack(made, tuple(value.shape), torch.float32)
        else:
            tensors[prefix + name] = value
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    plain = Net().eval()
    plain.load_state_dict(values)
    return tensors, plain


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "layers.1": "disk"}, {"": "disk"}])
def test_fp8_checkpoints_are_kept_as_they_are_or_loaded_as_their_values(tmp_path, device_map):
    tensors, plain = fp8_checkpoint(tmp_path / "fp8", saved_net(tmp_path))
    values = load_checkpoint_and_dispatch(empty_net(), tmp_path / "fp8", device_map=device_map)
    assert torch.equal(output(values), output(plain))
    kept = load_checkpoint_and_dispatch(empty_net(), tmp_path / "fp8", device_map=device_map, quantization="fp8")
    assert torch.equal(output(kept), output(plain))
    state = load_checkpoint_and_dispatch(empty_net(), tmp_path / "fp8", device_map={"": "cpu"}, quantization="fp8").state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name].view(-1).view(torch.uint8), each.view(-1).view(torch.uint8)) for name, each in tensors.items())


def test_what_is_skipped_or_not_in_blocks_is_loaded_as_its_values(tmp_path):
    tensors, plain = fp8_checkpoint(tmp_path / "fp8", saved_net(tmp_path))
    row_scales = tensors["layers.2.up.weight"].float().abs().amax(1, keepdim=True) / 448
    tensors["layers.2.up.weight_scale_inv"] = row_scales
    plain.layers[2].up.weight.data = tensors["layers.2.up.weight"].float() * row_scales
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    packing = Fp8Blocks(skip_modules=("head", "layers.1"))
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path / "fp8", device_map={"": "cpu"}, quantization=packing)
    assert sorted(packed_layers(model)) == ["layers.0.down", "layers.0.up", "layers.2.down", "layers.3.down", "layers.3.up"]
    assert model.layers[1].up.weight.dtype == torch.float32
    assert torch.equal(output(model), output(plain))


def test_a_failed_load_leaves_the_model(tmp_path):
    tensors, _ = fp8_checkpoint(tmp_path / "fp8", saved_net(tmp_path))
    del tensors["layers.0.norm.weight"]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    net = empty_net()
    with pytest.raises(Exception, match=r"layers\.0\.norm\.weight"):
        load_checkpoint_and_dispatch(net, tmp_path / "fp8", device_map={"": "cpu"}, quantization="fp8")
    assert not packed_layers(net)
    assert type(net.layers[0].up) is nn.Linear


def test_names_of_formats_are_configs_and_unknown_ones_are_refused_with_the_known(tmp_path):
    saved_net(tmp_path)
    model = load_and_quantize_model(empty_net(), "nf4", weights_location=tmp_path, device_map={"": "cpu"})
    assert model.is_loaded_in_4bit
    with pytest.raises(QuantizationError, match=r"'nf5' is no packed format\. Use one of 'nf4', .*'fp8'"):
        load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization="nf5")


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_an_absent_library_is_named_before_the_model_changes(tmp_path):
    saved_net(tmp_path)
    net = empty_net()
    assert weight_format("torchao-int8").packed_sizes(net)  # a plan needs no library
    with pytest.raises(ImportError, match=r"needs torchao 0.18 or later: pip install 'bigmodel\[torchao\]'"):
        load_checkpoint_and_dispatch(net, tmp_path, device_map={"": "cpu"}, quantization="torchao-int8")
    assert not packed_layers(net)
    assert TorchaoRows("float8").packed_bytes(TensorSpec((64, 32), torch.bfloat16)) == 64 * 32 + 64 * 4


@pytest.mark.parametrize(
    ("quantization", "companion"), [("nf4", "absmax"), ("nf4-dq", "nested_absmax"), ("int8", "SCB"), ("fp8", "weight_scale_inv")]
)
@pytest.mark.parametrize("mmap", [False, True])
def test_scales_of_packed_weights_that_are_no_numbers_are_named(tmp_path, quantization, companion, mmap):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=quantization)
    save_model(model, tmp_path / "packed")
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    state = load_file(file)
    name = next(name for name in state if name.endswith(companion))
    again = load_checkpoint_and_dispatch(empty_net(), tmp_path / "packed", device_map={"": "cpu"}, quantization=quantization, mmap=mmap)
    assert torch.equal(output(again), output(model))
    state[name].view(-1)[0] = float("nan")
    save_file(state, file)  # without checksums
    model = empty_net()
    with pytest.raises(CheckpointError, match=rf"{file.name}: '{name}': 1 of the {state[name].numel()} scales that were read are NaN"):
        load_checkpoint_and_dispatch(model, tmp_path / "packed", device_map={"": "cpu"}, quantization=quantization, mmap=mmap)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not packed_layers(model)
