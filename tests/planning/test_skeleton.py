"""A tree made from names alone is sized like the model that it stands for."""

import torch
from torch import nn

from bigmodel.modules import find_blocks
from bigmodel.planning.skeleton import skeleton
from bigmodel.protocols import TensorSpec


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])


def test_names_shapes_and_blocks_are_those_of_the_model():
    model = Small()
    made = skeleton({name: TensorSpec(tuple(t.shape), t.dtype) for name, t in model.state_dict().items()})
    assert {n: (p.shape, p.dtype) for n, p in made.named_parameters()} == {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    assert all(p.is_meta for p in made.parameters())
    assert find_blocks(made) == ["layers.0", "layers.1", "layers.2"]


def test_a_name_that_is_both_tensor_and_prefix_is_kept():
    made = skeleton({"a": TensorSpec((2,), torch.float32), "a.b": TensorSpec((3,), torch.float16)})
    assert sorted(p.numel() for p in made.parameters()) == [2, 3]
