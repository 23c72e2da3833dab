"""Bytes of size strings, dtypes and modules."""

from __future__ import annotations

import pytest
import torch
from model_for_test import ModelForTest
from planning_models import Decoder
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.planning import (
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
)

SIZES = {
    "": 236,
    "linear1": 64,
    "linear1.weight": 48,
    "linear1.bias": 16,
    "linear2": 100,
    "linear2.weight": 80,
    "linear2.bias": 20,
    "batchnorm": 72,
    "batchnorm.weight": 16,
    "batchnorm.bias": 16,
    "batchnorm.running_mean": 16,
    "batchnorm.running_var": 16,
    "batchnorm.num_batches_tracked": 8,
}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        (0, 0),
        ("0MB", 0),
        ("1KiB", 1024),
        ("1mib", 1024**2),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("20GB", 20 * 10**9),
        ("1 GB", 10**9),
        ("1e3MB", 10**9),
        ("1gB", 10**9),
        ("1Gb", 125_000_000),
        ("1gb", 125_000_000),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert convert_file_size_to_int(text) == nbytes


@pytest.mark.parametrize("text", ["1TB", "10", "5MBB", "5k0MB", "-1GB", -3, "GB", "nanGB"])
def test_sizes_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match=str(text)):
        convert_file_size_to_int(text)


@pytest.mark.parametrize("size", [1.5, None])
def test_sizes_of_other_types_are_refused(size):
    with pytest.raises(AttributeError):
        convert_file_size_to_int(size)


@pytest.mark.parametrize("dtype", [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)])
def test_bytes_of_an_element_are_what_torch_allocates(dtype):
    assert dtype_byte_size(dtype) == dtype.itemsize


def test_formats_without_a_torch_dtype():
    assert [dtype_byte_size(custom) for custom in (CustomDtype.FP8, CustomDtype.INT4, CustomDtype.INT2)] == [1, 0.5, 0.25]
    assert dtype_byte_size("bfloat16") == dtype_byte_size("torch.bfloat16") == 2
    with pytest.raises(ValueError, match="float99"):
        dtype_byte_size("float99")


def test_every_module_and_tensor_is_sized():
    assert compute_module_sizes(ModelForTest()) == SIZES
    assert list(compute_module_sizes(ModelForTest())) == [
        "", "linear1", "linear1.weight", "linear1.bias", "batchnorm", "batchnorm.weight", "batchnorm.bias", "linear2", "linear2.weight",
        "linear2.bias", "batchnorm.running_mean", "batchnorm.running_var", "batchnorm.num_batches_tracked",
    ]  # fmt: skip
    half = compute_module_sizes(ModelForTest().half())
    assert (half[""], half["batchnorm"]) == (122, 40)
    assert compute_module_sizes(ModelForTest(), dtype="float16")[""] == 122


@pytest.mark.parametrize("own", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("planned", [torch.float32, torch.bfloat16, torch.float64, None])
def test_planned_bytes_are_those_that_the_cast_allocates(own, planned):
    model = ModelForTest().to(own)
    model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    model.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
    planned_bytes = compute_module_sizes(model, dtype=planned)
    for tensor in [*model.parameters(), *model.buffers()]:
        if planned is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(planned)  # what loading does: floating tensors and no others
    allocated = {name: tensor.untyped_storage().nbytes() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert {name: planned_bytes[name] for name in allocated} == allocated
    assert planned_bytes[""] == sum(allocated.values())


def test_packed_formats_fill_whole_bytes():
    # 12 + 4 + 16 + 20 + 5 halves of a byte, each tensor rounded up, and the 8 bytes of the integer counter.
    sizes = compute_module_sizes(ModelForTest(), dtype=CustomDtype.INT4)
    assert sizes["linear2.bias"] == 3
    assert sizes[""] == 6 + 2 + 4 * 2 + 8 + 10 + 3


def test_special_dtypes_win_for_their_tensors():
    special = {"linear1.weight": torch.float32, "linear1.bias": torch.float32}
    assert compute_module_sizes(ModelForTest(), dtype=torch.float16, special_dtypes=special)["linear1"] == 64
    assert compute_module_sizes(ModelForTest(), special_dtypes={"linear1.weight": torch.int8})["linear1"] == 12 + 16


def test_buffers_alone():
    sizes = compute_module_sizes(ModelForTest(), buffers_only=True)
    assert sizes == {
        "": 40,
        "batchnorm": 40,
        "batchnorm.running_mean": 16,
        "batchnorm.running_var": 16,
        "batchnorm.num_batches_tracked": 8,
    }
    assert compute_module_total_buffer_size(ModelForTest()) == 40
    assert compute_module_total_buffer_size(ModelForTest(), dtype=torch.float16) == 24


def test_tied_tensors_count_once():
    model = Decoder(tied=True)
    sizes = compute_module_sizes(model)
    assert "head" not in sizes
    assert sizes[""] == sum(parameter.nbytes for parameter in model.parameters())
    shared = nn.Linear(2, 2)
    assert compute_module_sizes(nn.Sequential(shared, nn.Sequential(shared)))[""] == 24


def test_lazy_modules_have_no_size_yet():
    with pytest.raises(PlanError, match=r"0\.weight"):
        compute_module_sizes(nn.Sequential(nn.LazyLinear(3)))


def test_largest_layer():
    model = nn.Sequential(ModelForTest(), ModelForTest(), ModelForTest())
    modules, sizes = list(model.named_children()), compute_module_sizes(model)
    assert get_max_layer_size(modules, sizes, []) == (100, ["0.linear2", "1.linear2", "2.linear2"])
    assert get_max_layer_size(modules, sizes, ["ModelForTest"]) == (236, ["0", "1", "2"])
    assert get_max_layer_size(modules, sizes, "ModelForTest") == (236, ["0", "1", "2"])
    assert [name for name, _ in modules] == ["0", "1", "2"]
    assert get_max_layer_size([("linear1", ModelForTest().linear1)], SIZES, []) == (64, ["linear1"])
    assert calculate_maximum_sizes(model) == (708, (100, ["0.linear2", "1.linear2", "2.linear2"]))


def test_leaves_are_no_ones_parents():
    assert get_module_leaves({"": 1, "a": 1, "a.b": 1, "c": 2}) == ["a.b", "c"]
