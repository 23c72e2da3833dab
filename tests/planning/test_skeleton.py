"""A tree made from names alone is sized like the model that it stands for."""

import pytest
import torch
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.modules import find_blocks, row_tables
from bigmodel.planning.skeleton import Recorded, skeleton
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


def test_names_that_fall_together_keep_all_their_tensors():
    names = ["a", "a.b", "a_b", "a_b_", "c.d", "c", "c_"]
    made = skeleton({name: TensorSpec((2**index,), torch.float32) for index, name in enumerate(names)})
    assert sorted(p.numel() for p in made.parameters()) == [2**index for index in range(len(names))]


def test_names_that_no_model_has_are_refused():
    with pytest.raises(PlanError, match=r"5,000 modules inside each other"):
        skeleton({"a" + ".b" * 5000: TensorSpec((1,), torch.float32)})
    assert sum(p.numel() for p in skeleton({"a" + ".b" * 100: TensorSpec((3,), torch.float32)}).parameters()) == 3


def test_leaves_that_look_like_linears_and_embeddings_are_such():
    def spec(*shape: int, dtype: torch.dtype = torch.float16) -> TensorSpec:
        return TensorSpec(shape, dtype)

    made = skeleton(
        {
            "model.embed_tokens.weight": spec(7, 4),
            "model.layers.0.q_proj.weight": spec(8, 4),
            "model.layers.0.k_proj.weight": spec(8, 4),
            "model.layers.0.k_proj.bias": spec(8),
            "model.layers.0.packed.weight": spec(8, 4, dtype=torch.uint8),
            "model.layers.0.conv.weight": spec(8, 4, 3),
            "model.layers.0.norm.weight": spec(4),
            "model.layers.0.scaled.weight": spec(8, 4),
            "model.layers.0.scaled.weight_scale": spec(8),
            "transformer.wte.weight": spec(7, 4),
            "lm_head.weight": spec(7, 4),
        }
    )
    layer = made.model.layers[0]
    assert {name: type(child) for name, child in layer.named_children()} == {
        "q_proj": nn.Linear,
        "k_proj": nn.Linear,
        **dict.fromkeys(("packed", "conv", "norm", "scaled"), Recorded),
    }
    assert (layer.q_proj.in_features, layer.q_proj.out_features, layer.q_proj.bias) == (4, 8, None)
    assert layer.k_proj.bias.shape == (8,)
    assert layer.q_proj.weight is not layer.k_proj.weight
    assert type(made.lm_head) is nn.Linear
    assert row_tables(made) == {id(made.model.embed_tokens.weight), id(made.transformer.wte.weight)}
    assert repr(made).count("Linear") == 3
    with pytest.raises(PlanError, match="cannot run"):
        made()
