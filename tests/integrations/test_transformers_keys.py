"""The names of a checkpoint become the names of a transformers model, and every tensor gets transformers' own values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_transformers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_transformers import FAMILIES
from torch import nn

from bigmodel.errors import MatchError
from bigmodel.integrations.transformers import TransformersKeys, empty_model
from bigmodel.loading import Checkpoint, Match, match, materialize


def matched(folder: Path, **arguments) -> tuple[nn.Module, Match]:
    model = empty_model(folder, **arguments)
    return model, match(model, Checkpoint.open(folder), TransformersKeys(model))


def loaded(folder: Path, **arguments) -> nn.Module:
    model, found = matched(folder, **arguments)
    found.check(strict=True)
    materialize(model, found, progress=False)
    return model


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    own, theirs = model.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        assert own[name].dtype == value.dtype, name
        assert torch.equal(own[name], value), name


def rewrite(folder: Path, target: Path, change) -> Path:
    """A copy of the checkpoint in one file, with `change(tensors)` applied to its tensors."""
    tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_equals_the_one_that_transformers_loads(name, dtype, checkpoint_folder):
    folder = checkpoint_folder(name)
    assert_same_weights(loaded(folder, dtype=dtype), tiny_transformers.reference(folder, name, dtype=dtype))


def test_twelve_experts_are_stacked_in_the_order_of_their_numbers(checkpoint_folder):
    folder = checkpoint_folder("mixtral")
    model = loaded(folder)
    file = load_file_of(folder, "model.layers.1.block_sparse_moe.experts.10.w2.weight")
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj[10], file)


def load_file_of(folder: Path, name: str) -> torch.Tensor:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return load_file(folder / index["weight_map"][name])[name]


def test_experts_that_are_stacked_in_the_file_already_are_taken_as_they_are(tmp_path):
    tiny_transformers.save(tiny_transformers.make("mixtral"), tmp_path, save_original_format=False)
    assert_same_weights(loaded(tmp_path), tiny_transformers.reference(tmp_path, "mixtral"))


def test_torch_bin_files_with_both_names_of_a_tied_weight(tmp_path, checkpoint_folder):
    model = tiny_transformers.reference(checkpoint_folder("t5"), "t5")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_weights(loaded(tmp_path), model)


def test_one_fused_projection_is_cut_into_three(tmp_path, checkpoint_folder):
    tensors = {}
    rewrite(checkpoint_folder("nomic_bert"), tmp_path, tensors.update)
    assert any(name.endswith("Wqkv.weight") for name in tensors)
    assert_same_weights(loaded(tmp_path), tiny_transformers.reference(tmp_path, "nomic_bert"))


def test_old_names_of_layer_norms(tmp_path, checkpoint_folder):
    def age(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    folder = rewrite(checkpoint_folder("bert"), tmp_path, age)
    assert any(name.endswith("gamma") for name in Checkpoint.open(folder).entries)
    assert_same_weights(loaded(folder), tiny_transformers.reference(folder, "bert"))


def test_the_base_model_of_a_checkpoint_with_a_head_leaves_the_head_over(checkpoint_folder):
    folder = checkpoint_folder("bert")
    model, found = matched(folder, model_class="BertModel")
    expected = transformers.BertModel.from_pretrained(folder)
    assert all(name.startswith("cls.") for name in found.unexpected)
    assert {name for name in found.missing if not name.startswith("pooler")} == set()
    materialize(model, found, progress=False)
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in expected.state_dict().items() if not name.startswith("pooler"))


def test_a_model_with_a_head_on_the_checkpoint_of_its_base_model_lacks_the_head_only(tmp_path, checkpoint_folder):
    base = transformers.BertModel.from_pretrained(checkpoint_folder("bert"))
    tiny_transformers.save(base, tmp_path)
    _, found = matched(tmp_path, model_class="BertForSequenceClassification")
    assert set(found.missing) == {"classifier.weight", "classifier.bias"}
    assert found.unexpected == ()
    with pytest.raises(MatchError, match=r"classifier\.weight"):
        found.check()


def test_buffers_of_old_versions_in_the_checkpoint_are_no_leftovers(tmp_path, checkpoint_folder):
    def age(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    folder = rewrite(checkpoint_folder("llama"), tmp_path, age)
    assert_same_weights(loaded(folder), tiny_transformers.reference(folder, "llama"))


def test_leftovers_are_reported_under_the_names_of_the_checkpoint(tmp_path, checkpoint_folder):
    folder = rewrite(checkpoint_folder("llama"), tmp_path, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))
    _, found = matched(folder)
    assert found.unexpected == ("model.extra.weight",)


def test_a_second_tensor_for_the_same_weight_is_a_leftover(tmp_path, checkpoint_folder):
    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] = tensors["model.norm.weight"] + 1

    folder = rewrite(checkpoint_folder("llama"), tmp_path, double)
    model, found = matched(folder)
    assert found.unexpected == ("norm.weight",)
    materialize(model, found, progress=False)
    assert_same_weights(model, tiny_transformers.reference(folder, "llama"))


def test_an_expert_that_is_missing_is_named(tmp_path, checkpoint_folder):
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.block_sparse_moe.experts.5.w2.weight"]

    folder = rewrite(checkpoint_folder("mixtral"), tmp_path, lose)
    with pytest.raises(MatchError, match=r"model\.layers\.2\.mlp\.experts\.down_proj.*\[5\]"):
        matched(folder)[1].check()


def test_all_that_does_not_fit_is_told_at_once(tmp_path, checkpoint_folder):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.block_sparse_moe.experts.5.w2.weight"]
        tensors["model.layers.1.block_sparse_moe.experts.19.w2.weight"] = tensors[
            "model.layers.1.block_sparse_moe.experts.0.w2.weight"
        ].clone()
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]

    folder = rewrite(checkpoint_folder("mixtral"), tmp_path, change)
    with pytest.raises(MatchError) as error:
        matched(folder)[1].check()
    said = str(error.value)
    assert re.search(r"nothing fills 1 tensors of the model: model\.norm\.weight", said, re.IGNORECASE), said
    assert re.search(r"lm_head\.weight: \[\d+, \d+\] in the model", said), said
    assert re.search(r"model\.layers\.2\.mlp\.experts\.down_proj.*\[5\]", said), said
    assert re.search(r"model\.layers\.1\.mlp\.experts\.down_proj .* up to 19, the highest there", said), said


def test_a_part_of_the_experts_that_is_missing_is_named(tmp_path, checkpoint_folder):
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.search(r"layers\.2\..*\.w3\.", name)]:
            del tensors[name]

    folder = rewrite(checkpoint_folder("mixtral"), tmp_path, lose)
    with pytest.raises(MatchError, match=r"model\.layers\.2\.mlp\.experts\.gate_up_proj cannot .*\['\.experts\.\*\.w3\.weight'\]"):
        matched(folder)[1].check()


def test_experts_of_different_shapes_are_refused_by_name(tmp_path, checkpoint_folder):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.2.block_sparse_moe.experts.5.w2.weight"
        tensors[name] = tensors[name][:, :-1]

    folder = rewrite(checkpoint_folder("mixtral"), tmp_path, change)
    with pytest.raises(MatchError, match=r"model\.layers\.2\.mlp\.experts\.down_proj cannot be made"):
        matched(folder)[1].check()


def test_scales_are_applied_or_refused(tmp_path, checkpoint_folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    packed = {}

    def pack(tensors: dict[str, torch.Tensor], scale: torch.Tensor) -> None:
        packed["value"] = (tensors[name] * 100).to(torch.float8_e4m3fn)
        tensors[name] = packed["value"]
        tensors[name + "_scale_inv"] = scale

    model, found = matched(rewrite(checkpoint_folder("llama"), tmp_path / "right", lambda tensors: pack(tensors, torch.full((1, 1), 0.01))))
    found.check(strict=True)
    materialize(model, found, progress=False)
    assert torch.equal(model.get_parameter(name), packed["value"].float() * torch.tensor(0.01))
    _, found = matched(rewrite(checkpoint_folder("llama"), tmp_path / "wrong", lambda tensors: pack(tensors, torch.ones(3, 1))))
    with pytest.raises(MatchError, match=r"q_proj\.weight .*q_proj\.weight_scale_inv of shape \[3, 1\] does not tell"):
        found.check()


def test_users_renamings_come_first(tmp_path, checkpoint_folder):
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors["net." + name.replace("model.layers", "blocks")] = tensors.pop(name)

    folder = rewrite(checkpoint_folder("llama"), tmp_path, rename)
    model = empty_model(folder)
    rules = TransformersKeys(model, {r"^net\.": "", r"^blocks\.": "model.layers."})
    found = match(model, Checkpoint.open(folder), rules)
    found.check(strict=True)
    materialize(model, found, progress=False)
    assert_same_weights(model, tiny_transformers.reference(checkpoint_folder("llama"), "llama"))
