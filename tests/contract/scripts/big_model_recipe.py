"""The usual way to a model that is too big: empty, an index over shards, an automatic map under a budget, the rest on disk."""

import json
import os

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import save_file
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 32)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
plain = Net().eval()
state = plain.state_dict()
os.makedirs("checkpoint")
weight_map = {}
for number, names in enumerate([list(state)[:13], list(state)[13:]]):
    shard = f"model-{number + 1:05}-of-00002.safetensors"
    save_file({name: state[name] for name in names}, f"checkpoint/{shard}", metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(names, shard))
with open("checkpoint/model.safetensors.index.json", "w") as file:
    json.dump({"metadata": {}, "weight_map": weight_map}, file)

with init_empty_weights():
    model = Net()
assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
model = load_checkpoint_and_dispatch(
    model, "checkpoint", device_map="auto", max_memory={"cpu": 30_000}, no_split_module_classes=["Block"], offload_folder="offload"
)
model.eval()
assert set(model.hf_device_map.values()) == {"cpu", "disk"}
ids = torch.arange(8).reshape(2, 4)
with torch.no_grad():
    for _ in range(2):
        output = model(ids)
        assert torch.equal(output, plain(ids))
        assert output.device == ids.device
