"""Packed layers: bit for bit bitsandbytes' own, with companions that move, copy, save and load with their weight."""

from __future__ import annotations

import copy
import io

import bitsandbytes
import pytest
import torch
from torch import nn

from bigmodel.errors import QuantizationError
from bigmodel.quantization import BnbQuantizationConfig, FourBit, scheme_of
from bigmodel.quantization.layers import Linear4bit, Linear8bitLt
from bigmodel.quantization.packed_linear import packed_layer
from bigmodel.quantization.replacement import pack, replace_with_bnb_layers

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(64, 64), (40, 64), (33, 65), (300, 1001), (640, 1024)]


def packed(linear: nn.Linear, config: BnbQuantizationConfig) -> Linear4bit | Linear8bitLt:
    scheme = scheme_of(config)
    layer = packed_layer(linear, scheme, linear.weight.dtype)
    layer.fill(pack(linear.weight, scheme.format))
    return layer


def reference(linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    """bitsandbytes' own layer for the same weights."""
    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    if config.load_in_8bit:
        layer = bitsandbytes.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=config.llm_int8_threshold)
    else:
        layer = bitsandbytes.nn.Linear4bit(
            *shape,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
        layer.support_avx512bf16_for_cpu = False  # else its first forward on such a CPU rounds the scales, or fails
    layer.weight.data = linear.weight.detach().clone()
    if linear.bias is not None:
        layer.bias.data = linear.bias.detach().clone()
    return layer.to("cpu")


def config(bits: int, **arguments: object) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, **arguments)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_4bit_outputs_and_bytes_are_those_of_bitsandbytes(shape, dtype, kind, double):
    linear = nn.Linear(shape[1], shape[0]).to(dtype)
    wanted = config(4, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype)
    ours, theirs = packed(linear, wanted), reference(linear, wanted)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.absmax, theirs.weight.quant_state.absmax)
    if double:
        assert torch.equal(ours.nested_absmax, theirs.weight.quant_state.state2.absmax)
        assert torch.equal(ours.nested_offset, theirs.weight.quant_state.offset)
    for x in (torch.randn(3, shape[1]), torch.randn(2, 5, shape[1])):
        x = x.to(dtype)
        with torch.no_grad():
            assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("inputs", DTYPES)
def test_4bit_computes_in_the_compute_dtype_and_answers_in_that_of_the_input(compute, inputs):
    linear = nn.Linear(64, 96)
    wanted = config(4, bnb_4bit_compute_dtype=compute)
    ours, theirs = packed(linear, wanted), reference(linear, wanted)
    x = torch.randn(4, 64).to(inputs)
    with torch.no_grad():
        result = ours(x)
        assert result.dtype == inputs
        assert torch.equal(result, theirs(x))
    assert ours.bias is linear.bias
    assert ours.bias.dtype == torch.float32  # the layer of bitsandbytes casts its bias for good


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [0.0, 1.5, 6.0])
def test_8bit_outputs_and_bytes_are_those_of_bitsandbytes(shape, dtype, threshold):
    linear = nn.Linear(shape[1], shape[0]).to(dtype)
    wanted = config(8, llm_int8_threshold=threshold)
    ours, theirs = packed(linear, wanted), reference(linear, wanted)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.SCB, theirs.weight.SCB)
    for mode in (False, True):
        x = torch.randn(7, shape[1]).to(dtype)
        with torch.no_grad():
            assert torch.equal(ours.train(mode)(x), theirs.train(mode)(x))


FOUR = config(4, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="fp32")
EIGHT = config(8)


@pytest.mark.parametrize("wanted", [FOUR, EIGHT])
def test_layers_are_bitsandbytes_own_with_its_parameter_classes(wanted):
    layer = packed(nn.Linear(64, 64), wanted)
    if wanted is FOUR:
        assert isinstance(layer, bitsandbytes.nn.Linear4bit)
        assert type(layer.weight) is bitsandbytes.nn.Params4bit
        assert layer.weight.dtype == torch.uint8
        state = layer.weight.quant_state
        value = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state)  # as libraries unpack weights
        assert torch.equal(value, layer.unpacked())
    else:
        assert isinstance(layer, bitsandbytes.nn.Linear8bitLt)
        assert type(layer.weight) is bitsandbytes.nn.Int8Params
        assert layer.weight.dtype == torch.int8
        assert torch.equal(bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, layer.state.SCB), layer.unpacked())


@pytest.mark.parametrize("wanted", [FOUR, EIGHT])
def test_casts_change_what_is_not_packed_and_nothing_else(wanted):
    layer = packed(nn.Linear(64, 64), wanted)
    before = {name: tensor.clone() for name, tensor in layer.packed_tensors().items()}
    for cast in (nn.Module.half, nn.Module.float, lambda module: module.to("cpu", torch.bfloat16)):
        cast(layer)
        for name, tensor in layer.packed_tensors().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name])
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("wanted", [FOUR, EIGHT])
def test_copies_are_independent(wanted):
    layer = packed(nn.Linear(64, 64), wanted)
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = layer(x)
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(x), expected)
        for tensor in layer.packed_tensors().values():
            tensor.zero_()
        assert torch.equal(twin(x), expected)
    if wanted is FOUR:
        assert torch.equal(twin.weight.quant_state.absmax, twin.absmax)
        assert not torch.equal(layer.weight.quant_state.absmax, twin.absmax)


@pytest.mark.parametrize("wanted", [FOUR, EIGHT])
def test_a_pickled_layer_computes_the_same(wanted):
    layer = packed(nn.Linear(64, 64), wanted)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("wanted", [FOUR, config(4), EIGHT])
def test_state_dicts_have_the_names_and_values_of_bitsandbytes_and_load_back(wanted):
    linear = nn.Linear(64, 96)
    ours, theirs = packed(linear, wanted), reference(linear, wanted)
    state, expected = ours.state_dict(), theirs.state_dict()
    assert sorted(state) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    empty = packed_layer(nn.Linear(64, 96), scheme_of(wanted), torch.float16)
    empty.fill({name: torch.zeros_like(tensor) for name, tensor in ours.packed_tensors().items()})
    empty.load_state_dict(expected)
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(empty(x), ours(x))
    again = empty.state_dict()
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize("wanted", [FOUR, EIGHT])
def test_gradients_reach_inputs_and_biases_and_are_those_of_bitsandbytes(wanted):
    linear = nn.Linear(64, 96)
    ours, theirs = packed(linear, wanted), reference(linear, wanted)
    ours.train()
    theirs.train()
    x = torch.randn(5, 64)
    gradient = torch.randn(5, 96)
    found = []
    for layer in (ours, theirs):
        inputs = x.clone().requires_grad_()
        layer.bias.requires_grad_().grad = None
        layer(inputs).backward(gradient)
        found.append((inputs.grad, layer.bias.grad))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0].abs().sum() > 0


@pytest.mark.parametrize("wanted", [FOUR, EIGHT])
def test_packed_weights_refuse_to_be_trained(wanted):
    layer = packed(nn.Linear(64, 64), wanted)
    with pytest.raises(QuantizationError, match=r"Packed weights cannot be trained. Attach adapters \(LoRA\)"):
        layer.requires_grad_(True)
    scales = layer.SCB if wanted is EIGHT else layer.nested_absmax
    scales.requires_grad = True
    with pytest.raises(QuantizationError, match="Packed weights cannot be trained"):
        nn.Sequential(layer).train()
    assert layer.requires_grad_(False).train().training


@pytest.mark.parametrize("wanted", ["nf4-dq", "int8", "fp8"])
def test_a_model_that_shall_be_trained_is_told_which_weight_cannot(wanted):
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 2))
    replace_with_bnb_layers(model, wanted)
    for asked in (model, copy.deepcopy(model), model.half()):
        with pytest.raises(QuantizationError, match=r"packed.*Packed weights cannot be trained. Attach adapters"):
            asked.requires_grad_(True)
    with pytest.raises(QuantizationError, match=r"^0\.0 is packed"):
        model.requires_grad_(True)
    with pytest.raises(QuantizationError, match=r"^0\.1: Packed weights"):
        model[0][1].requires_grad_()
    assert not any(parameter.requires_grad for parameter in model.requires_grad_(False).parameters())


@pytest.mark.parametrize("name", ["nf4", "fp4-dq", "int8", "fp8"])
def test_float64_is_computed_with_the_values_of_float32(name):
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 2)).eval()
    x = torch.randn(5, 64)
    double = copy.deepcopy(single).double()
    expected = replace_with_bnb_layers(single, name)(x)
    made = replace_with_bnb_layers(double, name)(x.double())
    cast = single.double()(x.double())
    for result in (made, cast):
        assert result.dtype == torch.float64
        assert torch.allclose(result.float(), expected, atol=0.02)


def test_a_description_of_another_weight_is_refused():
    layer = packed(nn.Linear(64, 96), FOUR)
    other = packed(nn.Linear(96, 64), FOUR).state_dict()
    with pytest.raises((QuantizationError, RuntimeError), match=r"packed from \[64, 96\]"):
        layer.load_state_dict(other)


def test_storage_of_other_dtypes_holds_the_same_bytes():
    linear = nn.Linear(64, 96)
    as_bytes = packed(linear, config(4, bnb_4bit_quant_type="nf4"))
    other = FourBit("nf4", storage=torch.bfloat16)
    layer = Linear4bit(64, 96, other, torch.float32, torch.float32)
    layer.fill(pack(linear.weight, other))
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.unpacked(), as_bytes.unpacked())


@pytest.mark.parametrize("columns", [48, 96, 80, 7])
def test_rows_that_do_not_end_where_blocks_end_are_multiplied_right(columns):
    torch.manual_seed(0)
    linear = torch.nn.Linear(columns, 20)
    model = replace_with_bnb_layers(
        torch.nn.Sequential(linear), BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32"), []
    )
    weight = linear.weight.detach()
    packed, state = bitsandbytes.functional.quantize_4bit(weight.flatten(), blocksize=64, quant_type="nf4")
    values = bitsandbytes.functional.dequantize_4bit(packed, state).view(weight.shape)
    assert (values - weight).norm() < 0.15 * weight.norm()
    x = torch.randn(3, columns)
    assert torch.equal(model[0].unpacked(), values)
    with torch.no_grad():
        assert torch.equal(model(x), torch.nn.functional.linear(x, values, linear.bias))
