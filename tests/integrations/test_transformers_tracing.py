"""A conversion of transformers, traced on tensors without data, reads the same values that it computes on real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import core_model_loading as operations
from transformers.core_model_loading import WeightConverter

from bigmodel.integrations.transformers.tracing import trace_conversion
from bigmodel.loading import Checkpoint, Computed, Reader, Source
from bigmodel.loading.transfer import lower
from bigmodel.protocols import TensorSpec

EXPERTS = ["experts.0.{}.weight", "experts.1.{}.weight", "experts.2.{}.weight"]


class Target(nn.Module):
    """What the operations ask a model for: parameters' shapes, and a configuration."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Module()
        for name, shape in shapes.items():
            setattr(self.layer, name, nn.Module())
            getattr(self.layer, name).weight = nn.Parameter(torch.empty(shape, device="meta"))
        self.config = SimpleNamespace(num_attention_heads=2, get_text_config=lambda: self.config)


def converted(converter, first_target, collected, tensors, model, tmp_path) -> tuple[dict[str, Source], dict[str, torch.Tensor]]:
    """The traced sources, and the values that they give when they are read from a file."""
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    sources = trace_conversion(converter, first_target, collected, specs, model, torch.float32)
    values = {}
    for name, source in sources.items():
        transfer = lower(source, checkpoint.entries, name, torch.float32)
        values[name] = torch.empty(transfer.shape)
        Reader(checkpoint.identities).read([(transfer, values[name])])
    return sources, values


def computed_by_transformers(converter, first_target, collected, tensors, model) -> dict[str, torch.Tensor]:
    for pattern, names in collected.items():
        for name in names:
            converter.add_tensor(first_target, name, pattern, tensors[name])
    return converter.convert(first_target, model=model, config=model.config)


def tensors_of(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


CASES = {
    "stack": (
        lambda: WeightConverter(["experts.*.w2.weight"], ["experts.down"], [operations.MergeModulelist(dim=0)]),
        "layer.experts.down",
        {"experts.*.w2.weight": [name.format("w2") for name in EXPERTS]},
        tensors_of(*((name.format("w2"), (3, 4)) for name in EXPERTS)),
        Target(),
        True,
    ),
    "stack and concatenate": (
        lambda: WeightConverter(
            ["experts.*.w1.weight", "experts.*.w3.weight"],
            ["experts.gate_up"],
            [operations.MergeModulelist(dim=0), operations.Concatenate(dim=1)],
        ),
        "layer.experts.gate_up",
        {
            "experts.*.w3.weight": [name.format("w3") for name in EXPERTS],
            "experts.*.w1.weight": [name.format("w1") for name in EXPERTS],
        },
        tensors_of(*((name.format(part), (3, 4)) for part in ("w1", "w3") for name in EXPERTS)),
        Target(),
        True,
    ),
    "cut into equal parts": (
        lambda: WeightConverter(["qkv"], ["q", "k", "v"], [operations.Chunk(dim=0)]),
        "layer.q.weight",
        {"qkv": ["layer.qkv.weight"]},
        tensors_of(("layer.qkv.weight", (9, 4))),
        Target(q=(3, 4), k=(3, 4), v=(3, 4)),
        True,
    ),
    "cut by the model's shapes": (
        lambda: WeightConverter(["qkv"], ["q", "k", "v"], [operations.Split(dim=0)]),
        "layer.q.weight",
        {"qkv": ["layer.qkv.weight"]},
        tensors_of(("layer.qkv.weight", (9, 4))),
        Target(q=(5, 4), k=(2, 4), v=(2, 4)),
        True,
    ),
    "transpose": (
        lambda: WeightConverter(["q"], ["q"], [operations.Transpose(0, 1)]),
        "layer.q.weight",
        {"q": ["layer.q.weight"]},
        tensors_of(("layer.q.weight", (2, 5))),
        Target(q=(5, 2)),
        True,
    ),
    "transpose only what needs it": (
        lambda: WeightConverter(["q"], ["q"], [operations.Transpose(0, 1, check_dims=True)]),
        "layer.q.weight",
        {"q": ["layer.q.weight"]},
        tensors_of(("layer.q.weight", (2, 5))),
        Target(q=(2, 5)),
        True,
    ),
    "interleaved rows": (
        lambda: WeightConverter(["w13"], ["gate", "up"], [operations.Interleave(dim=0), operations.Chunk(dim=0)]),
        "layer.gate.weight",
        {"w13": ["layer.w13.weight"]},
        tensors_of(("layer.w13.weight", (6, 4))),
        Target(gate=(3, 4), up=(3, 4)),
        False,
    ),
    "rotary order": (
        lambda: WeightConverter(["q"], ["q"], [operations.PermuteForRope()]),
        "layer.q.weight",
        {"q": ["layer.q.weight"]},
        tensors_of(("layer.q.weight", (8, 3))),
        Target(q=(8, 3)),
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_traced_conversion_gives_transformers_values(case, tmp_path):
    make, first_target, collected, tensors, model, is_declared = CASES[case]
    expected = computed_by_transformers(make(), first_target, collected, dict(tensors), model)
    sources, values = converted(make(), first_target, collected, tensors, model, tmp_path)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name
    assert all(isinstance(source, Computed) != is_declared for source in sources.values())


class InPlace(operations.ConversionOps):
    """An operation that changes what it was given."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensors,) = input_dict.values()
        tensors[0].mul_(2)
        return {target_patterns[0]: tensors[0]}


class Scaled(operations.ConversionOps):
    """An operation of a quantization method: values times a scale that lies beside them."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: input_dict["q"][0] * input_dict["s"][0]}


@pytest.mark.parametrize("operation", [InPlace(), Scaled()], ids=["in place", "scaled"])
def test_an_operation_that_computes_is_computed(operation, tmp_path):
    patterns = ["q"] if isinstance(operation, InPlace) else ["q", "s"]
    tensors = tensors_of(("layer.q.weight", (3, 4)), ("layer.s.weight", (3, 1)))
    collected = {pattern: [f"layer.{pattern}.weight"] for pattern in patterns}
    sources, values = converted(WeightConverter(patterns, ["q"], [operation]), "layer.q.weight", collected, tensors, Target(), tmp_path)
    scale = 2 if isinstance(operation, InPlace) else tensors["layer.s.weight"]
    assert torch.equal(values["layer.q.weight"], tensors["layer.q.weight"] * scale)
    assert isinstance(sources["layer.q.weight"], Computed)
