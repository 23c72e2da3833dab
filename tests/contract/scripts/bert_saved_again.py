"""An encoder of transformers, loaded from shards with its last layers on disk, answers as before and is saved again."""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoModel, BertConfig, BertModel

torch.manual_seed(0)
config = BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, max_position_embeddings=40
)
plain = BertModel(config).eval()
plain.save_pretrained("checkpoint", max_shard_size="60KB")
inputs = {"input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
with init_empty_weights():
    model = AutoModel.from_config(config)
device_map = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk", "encoder.layer.2": "disk", "pooler": "cpu"}
model = load_checkpoint_and_dispatch(model, "checkpoint", device_map=device_map, offload_folder="offload").eval()
with torch.no_grad():
    expected = plain(**inputs, output_hidden_states=True)
    output = model(**inputs, output_hidden_states=True)
    assert type(output) is type(expected)
    assert torch.equal(output.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(output.pooler_output, expected.pooler_output)
    assert all(torch.equal(one, other) for one, other in zip(output.hidden_states, expected.hidden_states, strict=True))
    model.save_pretrained("again")
    assert torch.equal(BertModel.from_pretrained("again").eval()(**inputs).last_hidden_state, expected.last_hidden_state)
