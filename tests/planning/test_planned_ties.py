"""Tied weights in planning."""

from __future__ import annotations

import logging

import pytest
import torch
from model_for_test import ModelForTest
from torch import nn

from bigmodel.modules import find_tied_parameters
from bigmodel.planning import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    get_module_size_with_ties,
    retie_parameters,
)


def test_plain_models_have_no_config_to_ask():
    assert check_tied_parameters_in_config(ModelForTest()) is False


def test_transformers_models_say_so_in_their_config():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        for tied in (True, False):
            config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied)
            assert check_tied_parameters_in_config(transformers.LlamaForCausalLM(config)) is tied


def test_groups_on_several_devices_are_told(caplog):
    groups = [["linear1.weight", "linear2.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(groups, {"": 0})
        check_tied_parameters_on_same_device(groups, {"linear1": 0, "linear2": 0})
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(groups, {"linear1": 0, "linear2": 1})
    assert "Tied parameters are on different devices: " in caplog.text
    with pytest.raises(ValueError, match=r"The `device_map` does not contain the module linear2\.weight"):
        check_tied_parameters_on_same_device(groups, {"linear1": 0})


def test_size_with_ties_counts_shared_bytes_once():
    sizes = {"a": 100, "a.w": 60, "b": 80, "b.w": 60, "1": 5, "10": 50, "10.w": 40}
    modules = [("1", "one"), ("10", "ten"), ("b", "bee")]
    assert get_module_size_with_ties(["b.w"], 100, sizes, modules) == (120, ["b"], ["bee"])
    assert get_module_size_with_ties(["10.w"], 100, sizes, modules) == (110, ["10"], ["ten"])
    assert get_module_size_with_ties([], 100, sizes, modules) == (100, [], [])


def test_a_partner_with_two_shared_tensors_comes_along_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sizes = {**compute_module_sizes(model)}
    found = get_module_size_with_ties(["1.weight", "1.bias"], sizes["0"], sizes, [("1", model[1])])
    assert found == (80, ["1"], [model[1]])


def test_real_tensors_are_shared_again():
    model = nn.Sequential(ModelForTest(), ModelForTest())
    names = ["0.linear1.weight", "1.linear1.weight"]
    model[0].linear1.weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    retie_parameters(model, [names])
    assert model[0].linear1.weight is model[1].linear1.weight
    assert not model[0].linear1.weight.is_meta
    assert find_tied_parameters(model) == [names]


def test_groups_that_are_all_on_meta_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    retie_parameters(model, [["0.weight", "1.weight"]])
    assert model[0].weight is not model[1].weight
