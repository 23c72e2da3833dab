"""Behaviour §2, sizes."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from contract_models import Bigger, Tied
from model_for_test import ModelForTest
from torch import nn

from bigmodel import cpu_offload, init_empty_weights
from bigmodel.utils import (
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
    id_tensor_storage,
)
from bigmodel.utils.modeling import compute_module_total_buffer_size, get_module_leaves

TABLE = {
    "": 236,
    "linear1": 64,
    "linear1.weight": 48,
    "linear1.bias": 16,
    "batchnorm": 72,
    "batchnorm.weight": 16,
    "batchnorm.bias": 16,
    "batchnorm.running_mean": 16,
    "batchnorm.running_var": 16,
    "batchnorm.num_batches_tracked": 8,
    "linear2": 100,
    "linear2.weight": 80,
    "linear2.bias": 20,
}


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (7, 7),
        (0, 0),
        ("0MB", 0),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("2MiB", 2**21),
        ("3KiB", 3072),
        ("1GB", 10**9),
        ("1 GB", 10**9),
        ("1gB", 10**9),
        ("1Gb", 125_000_000),
        ("1gb", 125_000_000),
        ("8kb", 1000),
        ("1e3MB", 10**9),
        ("1.5KB", 1500),
    ],
)
def test_sizes(size, nbytes):
    found = convert_file_size_to_int(size)
    assert found == nbytes
    assert type(found) is int


@pytest.mark.parametrize("size", ["10", "5MBB", "5k0MB", "-1GB", -3, "GB", ""])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match=r"\S"):
        convert_file_size_to_int(size)


def test_bytes_of_an_element():
    assert dtype_byte_size(torch.float32) == 4
    assert dtype_byte_size(torch.bfloat16) == 2
    assert dtype_byte_size(torch.int8) == 1
    assert dtype_byte_size(torch.complex64) == 8
    assert dtype_byte_size(torch.uint16) == 2
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        assert dtype_byte_size(getattr(torch, name)) == 1
    assert dtype_byte_size(CustomDtype.FP8) == 1
    assert dtype_byte_size(CustomDtype.INT4) == 0.5
    assert dtype_byte_size(CustomDtype.INT2) == 0.25
    # What torch allocates: a bool and each packed pair of 4-bit floats take a byte.
    assert dtype_byte_size(torch.bool) == 1
    assert dtype_byte_size(torch.float4_e2m1fn_x2) == 1
    with pytest.raises(ValueError, match="no_dtype"):
        dtype_byte_size("no_dtype")


def test_every_prefix_has_its_bytes():
    sizes = compute_module_sizes(ModelForTest())
    assert isinstance(sizes, defaultdict)
    assert dict(sizes) == TABLE
    buffers = [f"batchnorm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(sizes)[-3:] == buffers  # after all parameters
    assert sizes["nothing"] == 0
    with init_empty_weights():
        assert dict(compute_module_sizes(ModelForTest())) == TABLE


def test_half_precision_leaves_integers():
    sizes = compute_module_sizes(ModelForTest().half())
    assert (sizes[""], sizes["batchnorm"]) == (122, 40)
    for dtype in (torch.float16, "float16", "torch.float16"):
        assert compute_module_sizes(ModelForTest(), dtype=dtype)[""] == 122


def test_up_casts_count():
    assert compute_module_sizes(ModelForTest().half(), dtype=torch.float32)[""] == 236


def test_packed_dtypes():
    sizes = compute_module_sizes(ModelForTest(), dtype=CustomDtype.INT4)
    assert sizes["linear1.weight"] == 6
    assert sizes["batchnorm.num_batches_tracked"] == 8
    assert sizes[""] == 37  # 36.5, in whole bytes tensor by tensor


def test_special_dtypes_win():
    sizes = compute_module_sizes(ModelForTest(), dtype=torch.float16, special_dtypes={"linear2.weight": torch.float32})
    assert sizes["linear2"] == 90
    assert sizes[""] == 162


def test_a_tie_counts_once():
    model = Tied()
    plain = compute_module_sizes(model)[""]
    model.tie_weights()
    sizes = compute_module_sizes(model)
    assert sizes[""] == plain - 240
    assert sizes["embed"] == 240
    assert sizes["head"] == 0


def test_buffers():
    assert compute_module_total_buffer_size(ModelForTest()) == 40
    assert compute_module_total_buffer_size(ModelForTest(), dtype=torch.float16) == 24
    sizes = compute_module_sizes(ModelForTest(), buffers_only=True)
    assert (sizes[""], sizes["batchnorm"], sizes["linear1"]) == (40, 40, 0)


def test_offloaded_models_have_their_sizes():
    assert dict(compute_module_sizes(cpu_offload(ModelForTest()))) == TABLE


def test_largest_layers():
    model = nn.Sequential(ModelForTest(), ModelForTest(), ModelForTest())
    sizes = compute_module_sizes(model)
    modules = list(model.named_children())
    given = list(modules)
    assert get_max_layer_size(modules, sizes, []) == (100, ["0.linear2", "1.linear2", "2.linear2"])
    assert get_max_layer_size(modules, sizes, ["ModelForTest"]) == (236, ["0", "1", "2"])
    assert modules == given
    assert get_max_layer_size([("0.linear1.weight", model[0].linear1.weight)], sizes, []) == (48, ["0.linear1.weight"])


def test_maximum_sizes():
    total, (largest, names) = calculate_maximum_sizes(Bigger())
    assert (total, largest) == (708, 100)
    assert names == ["parts.0.linear2", "parts.1.linear2", "parts.2.linear2"]
    model = Bigger()
    model._no_split_modules = ["ModelForTest"]
    assert calculate_maximum_sizes(model) == (708, (236, ["parts.0", "parts.1", "parts.2"]))


def test_leaves():
    assert list(get_module_leaves({"": 1, "a": 1, "a.b": 1, "c": 2})) == ["a.b", "c"]


def test_storages_are_told_apart():
    tensor = torch.zeros(6)
    assert id_tensor_storage(tensor) == id_tensor_storage(tensor[2:].view(2, 2))
    assert id_tensor_storage(tensor) == (torch.device("cpu"), tensor.untyped_storage().data_ptr(), 24)
    assert id_tensor_storage(tensor) != id_tensor_storage(torch.zeros(6))
    meta = torch.device("meta")
    assert id_tensor_storage(torch.zeros(6, device=meta)) == id_tensor_storage(torch.ones(6, device=meta))
