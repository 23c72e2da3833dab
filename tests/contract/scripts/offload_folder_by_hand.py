"""An offload folder written by hand, read back, and dispatched from; and an index into a safetensors file."""

import json
import os

import torch
from accelerate import dispatch_model
from accelerate.utils import OffloadedWeightsLoader, load_offloaded_weight, offload_state_dict, offload_weight, save_offload_index
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(2, 4)
expected = model(x)
state = {name: value.clone() for name, value in model.state_dict().items()}
offload_state_dict("offload", state)
assert sorted(os.listdir("offload")) == ["0.bias.dat", "0.weight.dat", "2.bias.dat", "2.weight.dat", "index.json"]
weights = OffloadedWeightsLoader(save_folder="offload")
assert list(weights) == list(state)
assert all(torch.equal(weights[name], value) for name, value in state.items())

index = {}
os.makedirs("other")
for name, value in {"scalar": torch.tensor(1.5), "half": torch.randn(3).bfloat16()}.items():
    offload_weight(value, name, "other", index)
    assert torch.equal(load_offloaded_weight(f"other/{name}.dat", index[name]), value)
save_offload_index(index, "other")
with open("other/index.json") as file:
    assert json.load(file) == {"scalar": {"dtype": "float32", "shape": []}, "half": {"dtype": "bfloat16", "shape": [3]}}

device_map = {"0": "cpu", "1": "cpu", "2": "disk"}
dispatch_model(model, device_map, offload_dir="offload")
assert torch.equal(model(x), expected)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model.load_state_dict(state)
save_file(state, "model.safetensors")
index = {name: {"safetensors_file": "model.safetensors", "weight_name": name, "dtype": "float32"} for name in state if name[0] == "2"}
dispatch_model(model, device_map, offload_index=index)
assert torch.equal(model(x), expected)
