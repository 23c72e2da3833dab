"""An encoder-decoder: saved by transformers, built empty, mapped, loaded with its decoder on disk, and asked to generate."""

import torch
from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=80, decoder_start_token_id=0)
plain = T5ForConditionalGeneration(config).eval()
plain.save_pretrained("checkpoint")
ids = torch.tensor([[5, 6, 7, 1]])
expected = plain.generate(ids, max_new_tokens=8, do_sample=False)

with init_empty_weights():
    model = AutoModelForSeq2SeqLM.from_config(config)
model.tie_weights()
model.eval()
device_map = infer_auto_device_map(model, max_memory={"cpu": "1MB"}, no_split_module_classes=["T5Block"], clean_result=False)
assert set(device_map.values()) == {"cpu"}
device_map = {
    "shared": "cpu",
    "encoder": "cpu",
    "decoder.embed_tokens": "cpu",
    "decoder.block": "disk",
    "decoder.final_layer_norm": "disk",
    "lm_head": "cpu",
}
model = load_checkpoint_and_dispatch(model, "checkpoint", device_map=device_map, offload_folder="offload")
assert model.hf_device_map == device_map
for _ in range(2):
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
