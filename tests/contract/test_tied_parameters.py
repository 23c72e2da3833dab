"""Behaviour §2, tied weights."""

from __future__ import annotations

import logging

import pytest
import torch
from contract_models import Tied
from model_for_test import ModelForTest
from torch import nn

from bigmodel.utils import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    named_module_tensors,
    retie_parameters,
)
from bigmodel.utils.modeling import get_module_size_with_ties, get_non_persistent_buffers


def tied():
    model = Tied()
    model.tie_weights()
    return model


def test_groups_are_lists_of_sorted_names():
    assert find_tied_parameters(tied()) == [["embed.weight", "head.weight"]]
    assert find_tied_parameters(Tied()) == []
    assert find_tied_parameters(ModelForTest(), anything=1) == []


def test_shared_modules_give_a_group_for_each_tensor():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["c"] = model["a"]
    assert sorted(find_tied_parameters(model)) == [["a.bias", "c.bias"], ["a.weight", "c.weight"]]


def test_only_identity_counts():
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert find_tied_parameters(model) == []
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False))
    model[1].running_mean = model[0].running_mean
    assert find_tied_parameters(model) == []


def test_the_real_tensor_is_shared_again():
    for real in ("embed", "head"):
        model = Tied()
        model.embed.weight = nn.Parameter(torch.empty(10, 6, device="meta"))
        model.head.weight = nn.Parameter(torch.empty(10, 6, device="meta"))
        weight = nn.Parameter(torch.ones(10, 6))
        getattr(model, real).weight = weight
        retie_parameters(model, [["embed.weight", "head.weight"]])
        assert model.embed.weight is weight
        assert model.head.weight is weight


def test_groups_on_meta_are_left():
    model = Tied().to("meta")
    before = model.embed.weight, model.head.weight
    retie_parameters(model, [["embed.weight", "head.weight"]])
    assert model.embed.weight is before[0]
    assert model.head.weight is before[1]


def test_different_devices_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": 0})
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": 0, "c": 1})
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0, "b": 1})
    assert "Tied parameters are on different devices" in caplog.text
    assert caplog.records[0].name.startswith("bigmodel.")


def test_an_uncovered_name_is_refused():
    with pytest.raises(ValueError, match="The `device_map` does not contain the module"):
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"a": 0})


def test_plain_models_have_no_config():
    assert check_tied_parameters_in_config(Tied()) is False


def test_transformers_models_are_asked():
    transformers = pytest.importorskip("transformers")
    for tie in (True, False):
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8, tie_word_embeddings=tie)
        assert check_tied_parameters_in_config(transformers.GPT2LMHeadModel(config)) is tie


def test_partners_come_along_and_shared_bytes_count_once():
    modules = [("1", nn.Linear(2, 2)), ("10", nn.Linear(2, 2)), ("2", nn.Linear(2, 2))]
    sizes = {"1": 100, "1.weight": 80, "10": 200, "10.weight": 160, "2": 7}
    size, names, parts = get_module_size_with_ties(["10.weight"], 50, sizes, modules)
    assert (size, names, parts) == (50 + 200 - 160, ["10"], [modules[1][1]])
    assert get_module_size_with_ties([], 50, sizes, modules) == (50, [], [])
    size, names, _ = get_module_size_with_ties(["1.weight", "10.weight"], 50, sizes, modules)
    assert (size, names) == (50 + 20 + 40, ["1", "10"])


def test_names_of_tensors():
    model = ModelForTest()
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    assert names == [
        "linear1.weight",
        "linear1.bias",
        "batchnorm.weight",
        "batchnorm.bias",
        "linear2.weight",
        "linear2.bias",
        "batchnorm.running_mean",
        "batchnorm.running_var",
        "batchnorm.num_batches_tracked",
    ]
    assert list(named_module_tensors(model)) == []
    assert [name for name, _ in named_module_tensors(model.batchnorm)] == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    assert [name for name, _ in named_module_tensors(model.batchnorm, include_buffers=False)] == ["weight", "bias"]


def test_buffers_outside_the_state_dict():
    model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
    model["a"].register_buffer("x", torch.ones(1), persistent=False)
    model["b"].register_buffer("x", torch.ones(1))
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"x"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"a.x"}
    names = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert names == ["b.x"]  # not filtered for its neighbour's name
    own = get_non_persistent_buffers(model["a"])
    own.clear()
    assert model["a"]._non_persistent_buffers_set == {"x"}
