"""A map with torch devices and strings, over a file that torch saved."""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


torch.manual_seed(0)
plain = build().eval()
torch.save(plain.state_dict(), "pytorch_model.bin")
x = torch.randn(3, 4)

device_map = {"0": torch.device("cpu"), "1": "cpu", "2": "disk", "3": torch.device("cpu"), "4": "disk"}
with init_empty_weights():
    model = build()
model = load_checkpoint_and_dispatch(model, "pytorch_model.bin", device_map=device_map, offload_folder="offload").eval()
assert torch.equal(model(x), plain(x))
assert [parameter.device.type for parameter in model.parameters()] == ["cpu", "cpu", "meta", "meta", "cpu", "cpu", "meta", "meta"]
assert model.hf_device_map == device_map

with init_empty_weights():
    model = build()
model = load_checkpoint_and_dispatch(model, "pytorch_model.bin", device_map={"": torch.device("cpu")}).eval()
assert torch.equal(model(x), plain(x))
assert not hasattr(model[0], "_hf_hook")
assert model.hf_device_map == {"": torch.device("cpu")}
