"""Stacks of expert matrices on their way from a checkpoint: cut in parts, turned, on accelerators, in little memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from quantized_models import return_free_memory
from safetensors.torch import save_file
from test_packed_stacks import Layer
from torch import nn

import bigmodel.loading.packing as packing_room
from bigmodel import load_checkpoint_and_dispatch, placement
from bigmodel.api import load_and_dispatch
from bigmodel.loading import Checkpoint, Concatenate, Stack, Transpose, Whole
from bigmodel.measure import PeakPrivateMemory
from bigmodel.quantization import PackedStack, pack, packed_layers, weight_format

SOME = ["nf4", "fp4-dq", "int8", "fp8"]


class Holder(nn.Module):
    """One stack, read by index."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.num_experts = shape[0]
        self.weights = nn.Parameter(torch.empty(shape, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weights[0])


def empty_holder(shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Holder(shape, dtype))


def check(model: nn.Module, value: torch.Tensor, name: str) -> None:
    """The packed stack holds what the whole value packed at once does."""
    for part, tensor in pack(value, weight_format(name)).items():
        found = model[0].weights.packed_tensors()[part]
        assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), part


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("shape", "dtype"), [((2, 1100, 2048), torch.bfloat16), ((3, 516, 2050), torch.float32)])
def test_matrices_larger_than_a_part_are_cut_within(tmp_path, name, shape, dtype):
    torch.manual_seed(0)
    value = torch.randn(shape).to(dtype)
    assert value[0].nbytes > packing_room.PART_BYTES
    save_file({"0.weights": value}, tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(empty_holder(shape, dtype), tmp_path, device_map={"": "cpu"}, quantization=name)
    check(model, value, name)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    ("shape", "part_bytes"), [((3, 7, 5), 1), ((6, 30, 33), 1000), ((6, 130, 33), 20_000), ((4, 256, 64), 3000), ((4, 256, 64), 100_000)]
)
def test_parts_of_any_size_give_the_same_bytes(tmp_path, monkeypatch, name, part_bytes, shape):
    monkeypatch.setattr(packing_room, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    value = torch.randn(shape).to(torch.bfloat16)
    save_file({"0.weights": value}, tmp_path / "model.safetensors")
    check(load_checkpoint_and_dispatch(empty_holder(shape), tmp_path, device_map={"": "cpu"}, quantization=name), value, name)


@dataclass
class OneByOne:
    """Rules for a checkpoint that holds each matrix alone, transposed, or in two halves."""

    count: int
    way: str

    def sources(self, entries, targets):
        names = [f"expert.{number}" for number in range(self.count)]
        if self.way == "alone":
            return {"0.weights": Stack(tuple(Whole(name) for name in names))}, []
        if self.way == "transposed":
            return {"0.weights": Stack(tuple(Transpose(Whole(name), 0, 1) for name in names))}, []
        if self.way == "stack transposed":
            return {"0.weights": Transpose(Whole("experts"), 1, 2)}, []
        halves = [tuple(Whole(f"{name}.{half}") for half in ("low", "high")) for name in names]
        return {"0.weights": Stack(tuple(Concatenate(each, 0) for each in halves))}, []


def saved(value: torch.Tensor, folder: Path, way: str) -> OneByOne:
    tensors = {}
    for number, matrix in enumerate(value):
        if way == "halves":
            middle = matrix.shape[0] // 2
            tensors[f"expert.{number}.low"], tensors[f"expert.{number}.high"] = matrix[:middle].clone(), matrix[middle:].clone()
        else:
            tensors[f"expert.{number}"] = (matrix.T if way == "transposed" else matrix).contiguous()
    if way == "stack transposed":
        tensors = {"experts": value.transpose(1, 2).contiguous()}
    save_file(tensors, folder / "model.safetensors")
    return OneByOne(len(value), way)


WAYS = ["alone", "transposed", "stack transposed", "halves"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("part_bytes", [2000, 1 << 22])
def test_experts_come_through_key_rules(tmp_path, monkeypatch, way, name, part_bytes):
    monkeypatch.setattr(packing_room, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    value = torch.randn(4, 72, 40).to(torch.bfloat16)
    rules = saved(value, tmp_path, way)
    model = load_and_dispatch(empty_holder((4, 72, 40)), Checkpoint.open(tmp_path), device_map={"": "cpu"}, rules=rules, quantization=name)
    check(model, value, name)


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_packed_experts_run_on_accelerators_wherever_they_rest(tmp_path, accelerators, name):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(4)))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    chosen = torch.tensor([0, 3, 1, 3])
    x = torch.randn(4, 48)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, chosen)
            return x

    save_file({f"layers.{key}": value for key, value in plain.state_dict().items()}, tmp_path / "model.safetensors")

    def empty() -> nn.Module:
        with torch.device("meta"):
            return Model()

    resident = load_checkpoint_and_dispatch(empty(), tmp_path, device_map={"": "cpu"}, quantization=name)
    accelerators(1, check_leaks=False)  # bitsandbytes keeps small tables on each device
    device_map = {"layers.0": 0, "layers.1": "cpu", "layers.2": "disk", "layers.3": "cpu"}
    model = load_checkpoint_and_dispatch(empty(), tmp_path, device_map=device_map, quantization=name)
    assert sum(isinstance(layer, PackedStack) for layer in packed_layers(model).values()) == 8
    with torch.no_grad():
        expected = resident(x, chosen)
        for _ in range(2):
            assert torch.allclose(model(x, chosen).cpu(), expected, rtol=1e-5, atol=1e-4)
    assert not placement(model).outside_reads
    rests = {row.name: row.rests for row in placement(model).rows if row.counters is not None}
    assert rests == {"layers.1": "cpu", "layers.2": "disk", "layers.3": "cpu"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_no_unpacked_stack_is_ever_in_memory(tmp_path, way, name):
    shape = (16, 1024, 1536)
    rules = saved(torch.randn(shape, dtype=torch.bfloat16), tmp_path, way)
    with torch.device("meta"):
        model = nn.Sequential(Holder(shape))
    return_free_memory()
    with PeakPrivateMemory() as memory:
        load_and_dispatch(model, Checkpoint.open(tmp_path), device_map={"": "cpu"}, rules=rules, quantization=name)
    packed = sum(tensor.nbytes for tensor in model.parameters())
    unpacked = 16 * 1024 * 1536 * 2
    assert memory.peak_bytes >= packed // 2  # what is measured is not memory that was free before
    assert memory.peak_bytes <= packed + unpacked // 4 + (32 << 20)
