"""Stacks of expert matrices, packed, and unpacked one matrix at a time."""

from __future__ import annotations

import copy
import io

import bitsandbytes.functional as kernels
import pytest
import torch
from torch import nn

from bigmodel import QuantizationError
from bigmodel.quantization import BnbQuantizationConfig, pack, packed_layers, replace_with_bnb_layers, select, weight_format
from bigmodel.quantization.packed_stack import PackedStack

EXPERTS = 5
FORMATS = ["nf4", "fp4", "nf4-dq", "fp4-dq", "int8"]


class Experts(nn.Module):
    """Computes with one expert after the other, as transformers' modules do."""

    def __init__(self, width: int = 48, inner: int = 24) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, inner, width))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, width, inner))
        self.bias = nn.Parameter(torch.randn(EXPERTS, width))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            rows = (chosen == expert).nonzero().squeeze(1)
            inner = nn.functional.linear(x[rows], self.up_proj[expert]).relu()
            out[rows] = nn.functional.linear(inner, self.down_proj[expert]) + self.bias[expert]
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x, chosen)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Layer().eval()


def dequantized(value: torch.Tensor, name: str) -> torch.Tensor:
    """What bitsandbytes makes of the whole stack."""
    if name == "int8":
        flat = value.flatten(0, -2).to(torch.float16)
        rows, scales, _ = kernels.int8_vectorwise_quant(flat)
        return kernels.int8_vectorwise_dequant(rows, scales).view(value.shape).to(value.dtype)
    # Flat, since blocks are: bitsandbytes' kernel for the CPU lets them begin anew with each row.
    packed, state = kernels.quantize_4bit(value.flatten(), blocksize=64, compress_statistics=name.endswith("dq"), quant_type=name[:3])
    return kernels.dequantize_4bit(packed, state).view(value.shape)


def config_of(name: str) -> BnbQuantizationConfig:
    if name == "int8":
        return BnbQuantizationConfig(load_in_8bit=True)
    return BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type=name[:3], bnb_4bit_use_double_quant=name.endswith("dq"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 24, 48), (3, 7, 5), (2, 3, 3), (7, 40, 96), (1, 300, 256)])
def test_each_matrix_is_that_of_the_whole_stack_unpacked_by_bitsandbytes(name, dtype, shape):
    torch.manual_seed(1)
    value = torch.randn(shape).to(dtype)
    packing = weight_format(name)
    stack = PackedStack(shape, packing, dtype)
    stack.fill(pack(value, packing))
    expected = dequantized(value, name)
    assert (expected.float() - value.float()).norm() < 0.15 * value.float().norm()
    for number in range(shape[0]):
        assert torch.equal(stack[number], expected[number])
        assert torch.equal(stack[torch.tensor(number)], expected[number])
    assert torch.equal(stack[-1], expected[-1])
    assert torch.equal(stack.unpacked(), expected)
    chosen = torch.tensor([0, shape[0] - 1, 0, 0])
    assert torch.equal(stack[chosen], expected[chosen])
    with pytest.raises(IndexError, match=f"no expert {shape[0]}: there are {shape[0]}"):
        stack[shape[0]]


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_those_of_the_unpacked_values(name):
    model, expected = net(), net()
    for parameter in (expected.experts.up_proj, expected.experts.down_proj):
        parameter.data = dequantized(parameter.data, name)
    sizes = weight_format(name).packed_sizes(model)
    replace_with_bnb_layers(model, config_of(name))
    x, chosen = torch.randn(20, 48), torch.arange(20) % EXPERTS
    with torch.no_grad():
        assert torch.equal(model(x, chosen), expected(x, chosen))
    taken = {stack: sum(each.numel() * each.element_size() for each in layer.parameters()) for stack, layer in packed_layers(model).items()}
    assert taken == sizes
    assert set(taken) == {"experts.up_proj", "experts.down_proj"}


@pytest.mark.parametrize("name", FORMATS)
def test_state_dicts_go_around_and_have_the_names_of_bitsandbytes(name):
    model, other = (replace_with_bnb_layers(net(), config_of(name)) for _ in range(2))
    with torch.no_grad():
        other.experts.up_proj.weight.zero_()
    state = model.state_dict()
    below = {key.removeprefix("experts.up_proj") for key in state if key.startswith("experts.up_proj")}
    description = f".quant_state.bitsandbytes__{name[:3]}"
    nested = {".nested_absmax", ".nested_quant_map"} if name.endswith("dq") else set()
    assert below == ({"", ".SCB"} if name == "int8" else {"", ".absmax", ".quant_map", description, *nested})
    assert other.load_state_dict(state) == nn.modules.module._IncompatibleKeys([], [])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    x, chosen = torch.randn(20, 48), torch.arange(20) % EXPERTS
    with torch.no_grad():
        assert torch.equal(model(x, chosen), other(x, chosen))
        assert torch.equal(copy.deepcopy(model)(x, chosen), model(x, chosen))


def test_scales_that_stand_beside_the_stack_in_a_state_dict_load_back():
    model, other = (replace_with_bnb_layers(net(), "fp8") for _ in range(2))
    with torch.no_grad():
        other.experts.up_proj.weight_scale_inv.zero_()
    state = model.state_dict()
    assert {"experts.up_proj", "experts.up_proj_scale_inv"} <= set(state)
    assert other.load_state_dict(state) == nn.modules.module._IncompatibleKeys([], [])
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


def test_a_cast_is_about_what_is_unpacked():
    model = replace_with_bnb_layers(net(), config_of("nf4"))
    packed = {key: value.clone() for key, value in model.experts.up_proj.packed_tensors().items()}
    model.half()
    assert model.experts.up_proj[2].dtype == torch.float16
    assert all(torch.equal(value, packed[key]) for key, value in model.experts.up_proj.packed_tensors().items())
    assert model.double().experts.up_proj[torch.tensor([1, 1])].dtype == torch.float64


def test_inputs_get_gradients_and_the_stack_gets_none():
    model, expected = net(), net()
    for parameter in (expected.experts.up_proj, expected.experts.down_proj):
        parameter.data = dequantized(parameter.data, "nf4")
    replace_with_bnb_layers(model, config_of("nf4"))
    given = torch.randn(20, 48)
    gradients = []
    for each in (model, expected):
        x = given.clone().requires_grad_()
        each(x, torch.arange(20) % EXPERTS).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    with pytest.raises(QuantizationError, match="cannot be trained"):
        model.experts.up_proj.requires_grad_()


def test_what_asks_for_all_matrices_is_told_how_to_ask_for_one():
    stack = replace_with_bnb_layers(net(), config_of("nf4")).experts.up_proj
    with pytest.raises(AttributeError, match=r"'transpose' asks for all expert matrices at once.*set_experts_implementation\('eager'\)"):
        stack.transpose(1, 2)
    with pytest.raises(QuantizationError, match="unpacked by number"):
        stack[0:2]
    assert not hasattr(stack, "unheard_of")
    assert len(stack) == EXPERTS


class Whole(Experts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(EXPERTS, -1, -1), self.up_proj.transpose(1, 2)).sum(0) + self.down_proj[0].sum()


class Reads(Layer):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.experts(x, chosen) + self.experts.down_proj.mean()


class Asks(Experts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x + getattr(self, "up_proj").sum()  # noqa: B009


class Sliced(Experts):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x @ self.up_proj[0:1].sum(0).T @ self.down_proj[:, 0]


def with_experts(experts: nn.Module) -> nn.Module:
    model = Layer()
    model.experts = experts
    return model


@pytest.mark.parametrize(
    ("model", "packed", "who"),
    [
        (with_experts(Whole()), {"experts.down_proj"}, "Whole computes with as a whole"),
        (Reads(), {"experts.up_proj"}, "Reads computes with as a whole"),
        (with_experts(Asks()), {"experts.down_proj"}, "Asks computes with as a whole"),
        (with_experts(Sliced()), set(), "Sliced computes with as a whole"),
    ],
)
def test_stacks_that_code_reads_as_a_whole_are_left(model, packed, who):
    found = select(model)
    assert set(found.stacks) == packed
    assert who in found.left["experts"]


def test_stacks_are_skipped_by_name():
    assert set(select(net(), ["up_proj"]).stacks) == {"experts.down_proj"}
    assert not select(net(), ["experts"]).stacks


def test_classes_without_source_are_left():
    made: dict[str, type[nn.Module]] = {}
    exec("class Typed(Experts):\n    def forward(self, x, chosen):\n        return x", {"Experts": Experts, "__name__": "nowhere"}, made)
    found = select(with_experts(made["Typed"]()))
    assert not found.stacks
    assert "code of Typed, which may read it, is not to be had" in found.left["experts"]
