"""LoRA adapters of PEFT over a dispatched Llama: outputs and gradients are those of the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bigmodel

peft = pytest.importorskip(
    "peft", reason="PEFT is not installed (it brings a peer of this package along, so it is no dependency of the tests)"
)

MAPS = [{"": "cpu", "model.layers": "disk"}, {"": "disk"}, {"": "cpu", "model.layers.1": "disk"}]
IDS = torch.arange(14).reshape(2, 7) % 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    with bigmodel.execution_devices():
        return peft.get_peft_model(model, config)


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_outputs_gradients_and_what_was_saved(folder, tmp_path, device_map):
    plain = adapted(LlamaForCausalLM.from_pretrained(folder).eval())
    model = adapted(bigmodel.from_pretrained(folder, dtype="float32", device_map=device_map))
    found = []
    for one in (plain, model):
        embedded = one.get_input_embeddings()(IDS).detach().requires_grad_(True)
        output = one(inputs_embeds=embedded, labels=IDS)
        output.loss.backward()
        gradients = {name: parameter.grad for name, parameter in one.named_parameters() if parameter.grad is not None}
        found.append({"logits": output.logits, "inputs": embedded.grad, **gradients})
    assert len(found[0]) == 2 + 18
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
    model.save_pretrained(tmp_path / "adapter")
    with bigmodel.execution_devices():
        again = peft.PeftModel.from_pretrained(
            bigmodel.from_pretrained(folder, dtype="float32", device_map=device_map), tmp_path / "adapter"
        )
    with torch.no_grad():
        expected = plain(IDS).logits
        assert torch.equal(again(IDS).logits, expected)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert torch.equal(model.merge_and_unload()(IDS).logits, plain.merge_and_unload()(IDS).logits)
