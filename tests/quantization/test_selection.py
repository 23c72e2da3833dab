"""Which layers are packed: exact names, heads, ties, and layers that others compute with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from bigmodel.quantization import keep_list, select


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.fc2 = linear()


class HeadFirst(nn.Module):
    """Its last child is the body."""

    def __init__(self) -> None:
        super().__init__()
        self.head = linear()
        self.body = nn.ModuleList(Block() for _ in range(12))


class NormLast(nn.Module):
    """Its last child holds nothing to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = linear()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = linear()
        self.norm = nn.LayerNorm(8)


def tiny_llama(**arguments: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **arguments
    )


def test_the_head_is_left_wherever_it_is_registered():
    assert keep_list(HeadFirst()) == ["head"]
    assert keep_list(NormLast()) == ["head"]
    assert keep_list(nn.Sequential(linear(), nn.ReLU(), linear())) == ["2"]
    assert list(select(HeadFirst()).left) == ["head"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LlamaForCausalLM(tiny_llama()), ["lm_head"]),
        (lambda: LlamaForCausalLM(tiny_llama(tie_word_embeddings=True)), ["lm_head", "model.embed_tokens"]),
        (lambda: LlamaModel(tiny_llama()), []),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)), ["lm_head", "transformer.wte"]),
    ],
)
def test_models_of_transformers(make, expected):
    with torch.device("meta"):
        model = make()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    assert sorted(keep_list(model)) == expected


def test_a_head_of_several_layers_is_left_whole():
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    left = select(BertForMaskedLM(config)).left
    assert {"cls.predictions.transform.dense", "cls.predictions.decoder"} <= set(left)


def test_a_name_matches_whole_components():
    model = HeadFirst()
    left = select(model, ["body.1"]).left
    assert sorted(left) == ["body.1.fc", "body.1.fc2"]  # not body.10, body.11
    left = select(model, ["fc"]).left
    assert sorted(left) == sorted(f"body.{n}.fc" for n in range(12))  # not fc2
    assert list(select(model, ["head"]).left) == ["head"]
    assert "head" in select(model, []).packed


def test_tied_layers_are_left_even_where_nothing_was_asked_to_be():
    model = HeadFirst()
    model.body[3].fc.weight = model.body[5].fc.weight
    left = select(model, []).left
    assert left == dict.fromkeys(["body.3.fc", "body.5.fc"], "its weight is tied to another module's")


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Named(nn.Linear):
    """A subclass that computes what Linear computes."""


def test_subclasses_with_a_forward_of_their_own_are_left():
    model = nn.Sequential(Scaled(8, 8), Named(8, 8), linear(), nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2), nn.ReLU())
    found = select(model, [])
    assert list(found.packed) == ["1", "2"]
    assert found.left == {
        "0": "Scaled has a forward of its own",
        "3.out_proj": "MultiheadAttention computes with its weight directly",
        "4.self_attn.out_proj": "MultiheadAttention computes with its weight directly",
        "4.linear1": "TransformerEncoderLayer computes with its weight directly",
        "4.linear2": "TransformerEncoderLayer computes with its weight directly",
    }


def test_what_a_class_of_transformers_wants_in_float32_is_left():
    config = T5Config(vocab_size=64, d_model=32, d_ff=48, num_layers=2, num_heads=2, d_kv=16)
    model = T5ForConditionalGeneration(config)
    assert "wo" in type(model)._keep_in_fp32_modules
    for skipped in (None, ["lm_head"]):
        chosen = select(model, skipped)
        assert not [name for name in chosen.packed if name.endswith("wo")]
        assert "encoder.block.0.layer.1.DenseReluDense.wi" in chosen.packed
        assert "its model's class wants it in float32" in chosen.left["encoder.block.0.layer.1.DenseReluDense.wo"]
    assert not [name for name in select(nn.ModuleDict({"inner": model})).packed if name.endswith("wo")]


def test_the_head_is_left_and_not_what_is_called_so_further_down():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
    found = select(model)
    assert set(found.packed) == {"0.0", "0.1"}
    assert set(found.left) == {"1"}
