"""A language model of transformers, dispatched by hand over RAM and disk, generates what it generated before."""

import torch
from accelerate import dispatch_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=32, vocab_size=100, n_positions=64)).eval()
model.tie_weights()
ids = torch.tensor([[1, 2, 3, 4]])
arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
expected = model.generate(ids, **arguments)
device_map = {
    "transformer.wte": "cpu",
    "transformer.wpe": "cpu",
    "transformer.h.0": "cpu",
    "transformer.h.1": "disk",
    "transformer.h.2": "disk",
    "transformer.ln_f": "disk",
    "lm_head": "cpu",
}
model = dispatch_model(model, device_map=device_map, offload_dir="offload")
assert model.hf_device_map == device_map
assert model.lm_head.weight is model.transformer.wte.weight
assert model.transformer.h[1].mlp.c_fc.weight.device.type == "meta"
assert model.transformer.h[0].mlp.c_fc.weight.device.type == "cpu"
assert torch.equal(model.generate(ids, **arguments), expected)
assert torch.equal(model.generate(ids, num_beams=2, **arguments), model.generate(ids, num_beams=2, **arguments))
