"""Facts about module trees: blocks, ties, names of tensors."""

import pytest
import torch
from torch import nn

from bigmodel.modules import find_blocks, find_tied_parameters, get_non_persistent_buffers, named_module_tensors, row_tables, tensor_aliases


class Expert(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2), nn.Linear(2, width)


class Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(experts)])


class Stage(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Expert(width) for _ in range(layers)])
        self.downsample = nn.Linear(width, 2 * width)


class Model(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.parts = nn.ModuleList(parts)


def test_children_of_the_list_are_blocks():
    assert find_blocks(Model([nn.Linear(4, 4) for _ in range(3)])) == ["parts.0", "parts.1", "parts.2"]


def test_layers_of_experts_are_the_blocks_although_the_experts_are_more():
    assert find_blocks(Model([Layer(8) for _ in range(3)])) == ["parts.0", "parts.1", "parts.2"]


def test_a_first_layer_without_experts_does_not_change_that():
    assert find_blocks(Model([Layer(0), Layer(8), Layer(8)])) == ["parts.0", "parts.1", "parts.2"]


def test_a_single_layer_is_a_block_too():
    assert find_blocks(Model([Expert()])) == ["parts.0"]
    assert find_blocks(Model([Stage(3, 4)])) == [f"parts.0.layers.{index}" for index in range(3)]


def test_layers_of_several_classes_that_take_turns_are_blocks():
    assert find_blocks(Model([Layer(0), Expert(), Layer(0), Expert()])) == [f"parts.{index}" for index in range(4)]


def test_stages_of_layers_are_split_into_their_layers():
    found = find_blocks(Model([Stage(2, 4), Stage(3, 8)]))
    assert found == ["parts.0.layers.0", "parts.0.layers.1", "parts.1.layers.0", "parts.1.layers.1", "parts.1.layers.2"]


def test_lists_of_lists_are_split_into_the_inner_children():
    found = find_blocks(Model([nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]) for _ in range(2)]))
    assert found == [f"parts.{stage}.{layer}" for stage in range(2) for layer in range(3)]


@pytest.mark.parametrize("classes", ["Layer", ["Layer"], ("Layer",), {"Layer"}])
def test_named_classes_win(classes):
    assert find_blocks(Model([Layer(2), Layer(2)]), classes) == ["parts.0", "parts.1"]
    assert find_blocks(Model([Layer(2)]), "Expert") == ["parts.0.experts.0", "parts.0.experts.1"]


def test_transformers_own_list_is_used():
    model = Model([Layer(2), Layer(2)])
    model._no_split_modules = ["Expert"]
    assert len(find_blocks(model)) == 4
    model._no_split_modules = ["NotHere"]
    assert find_blocks(model) == ["parts.0", "parts.1"]
    assert find_blocks(model, "NotHere") == []


def test_ties_are_found_by_identity():
    model = Model([nn.Linear(4, 5), nn.Linear(4, 5)])
    assert find_tied_parameters(model) == []
    model.parts[1].weight = model.embed.weight
    assert find_tied_parameters(model) == [["embed.weight", "parts.1.weight"]]
    assert tensor_aliases(model)["embed.weight"] == ["embed.weight", "parts.1.weight"]


def test_tensors_come_with_names_parameters_first():
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert [name for name, _ in named_module_tensors(norm)] == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "scratch",
    ]
    assert "scratch" not in dict(named_module_tensors(norm, remove_non_persistent=True))
    assert get_non_persistent_buffers(nn.Sequential(norm), recurse=True, fqns=True) == {"0.scratch"}


def test_row_tables_are_untied_embeddings_without_a_norm_limit():
    model = nn.Module()
    model.free, model.tied, model.limited = nn.Embedding(3, 2), nn.Embedding(3, 2), nn.Embedding(3, 2, max_norm=1.0)
    model.head = nn.Linear(2, 3, bias=False)
    model.head.weight = model.tied.weight
    assert row_tables(model) == {id(model.free.weight)}
