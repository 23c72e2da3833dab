"""Structures of tensors within one process."""

from __future__ import annotations

import pickle
from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.modeling_outputs import BaseModelOutput

from bigmodel.errors import TrainingError
from bigmodel.utils import (
    ConvertOutputsToFp32,
    TensorInformation,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
    is_torch_tensor,
    listify,
    pad_input_tensors,
    recursively_apply,
    slice_tensors,
)

Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    ids: Any
    name: str


def test_predicates() -> None:
    assert is_torch_tensor(torch.ones(1))
    assert not is_torch_tensor([1])
    assert is_tensor_information(TensorInformation(torch.Size([1]), torch.float32))
    assert not is_tensor_information(torch.ones(1))


def test_honor_type() -> None:
    assert honor_type([1], (x for x in (2, 3))) == [2, 3]
    assert honor_type((1,), (x for x in (2, 3))) == (2, 3)
    pair = honor_type(Pair(1, 2), (x for x in (2, 3)))
    assert isinstance(pair, Pair)
    assert pair == Pair(2, 3)


def test_a_function_is_applied_to_all_tensors_of_any_container() -> None:
    x = torch.ones(2)
    data = {"list": [x, 1, None, "s"], "pair": Pair(x, x), "user": UserDict(a=x), "batch": Batch(x, "n"), "default": defaultdict(list, a=x)}
    doubled = recursively_apply(lambda tensor, factor, plus: tensor * factor + plus, data, 2, plus=1)
    assert torch.equal(doubled["list"][0], torch.full((2,), 3.0))
    assert doubled["list"][1:] == [1, None, "s"]
    assert isinstance(doubled["pair"], Pair)
    assert isinstance(doubled["user"], UserDict)
    assert torch.equal(doubled["batch"].ids, torch.full((2,), 3.0))
    assert doubled["default"]["unknown"] == []
    assert torch.equal(data["batch"].ids, x)
    output = recursively_apply(torch.neg, BaseModelOutput(last_hidden_state=x))
    assert torch.equal(output.last_hidden_state, -x)
    features = recursively_apply(torch.neg, BatchFeature({"pixels": x}))
    assert isinstance(features, BatchFeature)
    assert torch.equal(features["pixels"], -x)


def test_what_is_no_tensor_may_be_refused() -> None:
    with pytest.raises(TypeError) as caught:
        recursively_apply(torch.tensor, [torch.ones(1), 1], error_on_other_type=True)
    assert isinstance(caught.value, TrainingError)
    assert str(caught.value) == (
        "Unsupported types (<class 'int'>) passed to `tensor`. Only nested list/tuple/dicts of objects that are valid for "
        "`is_torch_tensor` should be passed."
    )
    assert recursively_apply(str, [1, "a"], test_type=lambda leaf: isinstance(leaf, int)) == ["1", "a"]


def test_descriptions_and_tensors_made_from_them() -> None:
    data = {"a": torch.zeros(2, 3, dtype=torch.int64), "b": [torch.tensor(1.0)], "n": 5}
    described = get_data_structure(data)
    assert described == {
        "a": TensorInformation(torch.Size([2, 3]), torch.int64),
        "b": [TensorInformation(torch.Size([]), torch.float32)],
        "n": 5,
    }
    assert get_shape(data) == {"a": [2, 3], "b": [[]], "n": 5}
    assert get_data_structure(initialize_tensors(described)) == described


def test_batch_size() -> None:
    assert find_batch_size({"ids": [torch.zeros(4, 2)], "other": torch.zeros(3)}) == 4
    assert find_batch_size(Batch(torch.zeros(5), "n")) == 5
    assert find_batch_size({"labels": None, "x": torch.zeros(2)}) == 2
    with pytest.raises(ValueError, match="Cannot find the batch size from empty <class 'list'>"):
        find_batch_size([])
    with pytest.raises(TypeError, match="Can only find the batch size of tensors but got <class 'int'>"):
        find_batch_size([1])
    with pytest.raises(ValueError, match="without dimensions"):
        find_batch_size(torch.tensor(1))
    assert ignorant_find_batch_size(torch.zeros(4)) == 4
    assert [ignorant_find_batch_size(data) for data in ([], [1], None, {}, torch.tensor(1))] == [None] * 5


def test_numbers() -> None:
    half = torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True)
    data = {"a": torch.tensor([[1, 2]]), "b": half, "c": torch.tensor(2.0), "d": torch.tensor([0.5]).to(torch.float8_e4m3fn), "n": "x"}
    assert listify(data) == {"a": [[1, 2]], "b": [1.5], "c": 2.0, "d": [0.5], "n": "x"}


def test_slices() -> None:
    sliced = slice_tensors({"a": torch.arange(6), "n": 1}, slice(2, 4), process_index=0, num_processes=2)
    assert listify(sliced) == {"a": [2, 3], "n": 1}


def test_joins() -> None:
    def part(value: float) -> dict[str, Any]:
        x = torch.full((1, 2), value)
        return {"list": [x], "pair": Pair(x, x), "batch": UserDict(a=x), "tensor": x}

    joined = concatenate([part(1.0), part(2.0)])
    assert isinstance(joined["pair"], Pair)
    assert isinstance(joined["batch"], UserDict)
    assert joined["tensor"].tolist() == joined["list"][0].tolist() == joined["batch"]["a"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert concatenate([torch.zeros(1, 2), torch.zeros(1, 3)], dim=1).shape == (1, 5)
    assert concatenate(["alone"]) == "alone"
    for wrong in (["a", "b"], [1, 2], [None, None], []):
        with pytest.raises(TypeError):
            concatenate(wrong)
    with pytest.raises(TrainingError, match=r"keys \['a'\] and dict with keys \['b'\]"):
        concatenate([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(TrainingError, match="list of 2, list of 1"):
        concatenate([[torch.ones(1)] * 2, [torch.ones(1)]])


@pytest.mark.parametrize(("rows", "processes", "expected"), [(5, 4, 8), (4, 4, 4), (1, 4, 4), (9, 2, 10), (3, 1, 3), (0, 4, 0)])
def test_the_last_row_is_repeated_up_to_the_next_multiple(rows, processes, expected) -> None:
    x = torch.arange(rows * 2.0).view(rows, 2)
    padded = pad_input_tensors({"x": x, "t": x.t(), "mask": torch.ones(1 if rows != 1 else 7, 7), "n": None}, rows, processes)
    assert torch.equal(padded["x"], torch.cat([x, *[x[-1:]] * (expected - rows)]))
    assert padded["mask"].shape[0] == (1 if rows != 1 else 7)
    assert padded["n"] is None
    assert torch.equal(pad_input_tensors(x.t(), rows, processes, dim=1), padded["x"].t())


def test_halves_become_float32() -> None:
    data = [torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.float8_e5m2)]
    converted = convert_to_fp32({"x": data, "n": 1})
    assert [tensor.dtype for tensor in converted["x"]] == [torch.float32, torch.float32, torch.float64, torch.int64, torch.float8_e5m2]
    assert converted["x"][2] is data[2]
    compiled = torch.compile(lambda x: convert_to_fp32({"a": x, "b": [Pair(x, 1)]})["b"][0].first + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2, dtype=torch.bfloat16)), torch.full((2,), 2.0))


def double(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Twice."""
    return {"twice": x * 2}


def test_outputs_become_float32() -> None:
    forward = convert_outputs_to_fp32(double)
    result = forward(torch.ones(1, dtype=torch.float16))
    assert (result["twice"].dtype, result["twice"].item()) == (torch.float32, 2.0)
    assert isinstance(forward.__wrapped__, ConvertOutputsToFp32)
    assert forward.__wrapped__.__wrapped__ is double
    assert forward.__wrapped__.__doc__ == "Twice."
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(ConvertOutputsToFp32(double))
    assert pickle.loads(pickle.dumps(forward.__wrapped__.__wrapped__)) is double
