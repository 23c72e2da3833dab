"""A plan's bytes of packed weights are those that bitsandbytes allocates."""

from __future__ import annotations

import subprocess
import sys
import time

import bitsandbytes
import pytest
import torch
from torch import nn

from bigmodel.errors import QuantizationError
from bigmodel.planning import plan
from bigmodel.planning.sizes import tensor_bytes_rule
from bigmodel.protocols import TensorSpec, WeightFormat
from bigmodel.quantization import FORMAT_NAMES, FourBit, Int8, weight_format
from bigmodel.quantization.formats import weight_formats

SHAPES = [(64, 64), (3, 7), (33, 65), (128, 4096), (1, 1), (2, 127), (640, 1024)]


def storages(*tensors: torch.Tensor | None) -> int:
    """Bytes of all distinct storages."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def allocated_4bit(weight: bitsandbytes.nn.Params4bit) -> int:
    state = weight.quant_state
    nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
    return storages(weight.data, state.absmax, state.code, *nested)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_4bit_bytes_are_those_that_a_layer_of_bitsandbytes_takes(shape, double, kind, storage):
    rows, columns = shape
    if storage != torch.uint8 and rows * columns % 4:
        pytest.skip("bitsandbytes keeps such weights only as bytes")
    layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, compress_statistics=double, quant_type=kind, quant_storage=storage)
    layer.to("cpu")  # packs
    assert layer.weight.bnb_quantized
    packed = FourBit(kind, double, storage=storage)
    assert packed.packed_bytes(TensorSpec(shape, torch.float32)) == allocated_4bit(layer.weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_8bit_bytes_are_those_that_a_layer_of_bitsandbytes_takes(shape):
    rows, columns = shape
    layer = bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False)
    layer.to("cpu")
    assert layer.weight.dtype == torch.int8
    assert Int8().packed_bytes(TensorSpec(shape, torch.float32)) == storages(layer.weight.data, layer.weight.CB, layer.weight.SCB)


def test_every_name_gives_a_format_that_says_its_name():
    for name in FORMAT_NAMES:
        found = weight_format(name)
        assert found.name == name
        assert isinstance(found, WeightFormat)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(QuantizationError, match=r"'q4_k' is no packed format. Use one of 'nf4', 'nf4-dq', 'fp4', 'fp4-dq', 'int8'"):
        weight_format("q4_k")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 100)


def test_packed_sizes_name_the_packed_weights_and_nothing_else():
    with torch.device("meta"):
        model = Model()
    sizes = weight_format("nf4").packed_sizes(model)
    one = 64 * 128 // 2 + 64 * 128 // 64 * 4 + 64
    assert sizes == {f"layers.{n}.{name}.weight": one for n in range(3) for name in ("up", "down")}


def test_a_plan_with_packed_sizes_counts_them_and_everything_else_in_its_dtype():
    with torch.device("meta"):
        model = Model()
    sizes = weight_format("int8").packed_sizes(model)
    rule = tensor_bytes_rule(torch.float16, packed_sizes=sizes)
    total = sum(rule(name, tensor) for name, tensor in model.named_parameters())
    linear = 3 * (64 * 128 * 2 + 128 * 4 + 64 * 4)
    rest = 2 * (100 * 64 + 3 * (2 * 64 + 128) + 64 * 100 + 100)
    assert total == linear + rest
    assert plan(model, {"cpu": 10**9}, dtype=torch.float16).total_bytes > total


def test_a_layer_in_two_places_has_all_its_names():
    with torch.device("meta"):
        model = Model()
        model.layers[2] = model.layers[0]
    sizes = weight_format("nf4").packed_sizes(model)
    assert {"layers.0.up.weight", "layers.2.up.weight"} <= set(sizes)


def test_sizes_of_seventy_thousand_layers_take_tenths_of_a_second():
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList()
        for _ in range(60):
            experts = nn.ModuleList(nn.Module() for _ in range(390))
            for expert in experts:
                for name in ("gate", "up", "down"):
                    expert.add_module(name, nn.Linear(8, 8, bias=False))
            model.layers.append(nn.ModuleDict({"experts": experts}))
        model.head = nn.Linear(8, 8)
    started = time.process_time()
    sizes = weight_format("nf4").packed_sizes(model)
    seconds = time.process_time() - started
    assert len(sizes) == 60 * 390 * 3
    assert seconds < 2, seconds  # of CPU time; 0.5 on an idle core


def test_sizes_do_not_import_bitsandbytes():
    code = (
        "import sys; from torch import nn; import bigmodel.utils; from bigmodel.quantization import weight_format;"
        "weight_format('nf4-dq').packed_sizes(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)));"
        "assert 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_formats_that_are_compared_for_one_model_have_the_sizes_that_each_has_alone():
    model = nn.Sequential(nn.Linear(96, 64), nn.Sequential(nn.Linear(64, 200), nn.Linear(200, 8)), nn.Linear(8, 8))
    names = ["int8", "nf4-dq", "nf4"]
    formats = weight_formats(names)
    assert [each.name for each in formats] == names
    assert [each.packed_sizes(model) for each in formats] == [weight_format(name).packed_sizes(model) for name in names]
    spec = TensorSpec((96, 64), torch.bfloat16)
    assert [each.packed_bytes(spec) for each in formats] == [weight_format(name).packed_bytes(spec) for name in names]
