"""A decoder loaded in another dtype than its checkpoint's, two of its layers on disk, generates with and without its cache."""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
plain = LlamaForCausalLM(config).eval()
plain.save_pretrained("checkpoint")
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(config)
model.tie_weights()
names = ["model.embed_tokens", *(f"model.layers.{index}" for index in range(3)), "model.norm", "model.rotary_emb", "lm_head"]
model = load_checkpoint_and_dispatch(
    model,
    "checkpoint",
    device_map={name: "disk" if name in ("model.layers.1", "model.layers.2") else "cpu" for name in names},
    offload_folder="offload",
    dtype=torch.bfloat16,
    skip_keys="past_key_values",
    no_split_module_classes=["LlamaDecoderLayer"],
).eval()
plain.to(torch.bfloat16)
assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
ids = torch.tensor([[1, 5, 9, 3]])
with torch.no_grad():
    assert torch.allclose(model(ids).logits.float(), plain(ids).logits.float(), atol=0.05)
arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
assert torch.equal(model.generate(ids, **arguments), model.generate(ids, use_cache=False, **arguments))
