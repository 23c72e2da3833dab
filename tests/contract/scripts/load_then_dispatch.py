"""The two steps by hand: load with a part on disk, then dispatch from the same folder; and loading with another dtype."""

import os

import torch
from accelerate import dispatch_model, init_empty_weights, load_checkpoint_in_model
from safetensors.torch import save_file
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


torch.manual_seed(0)
plain = build()
save_file(plain.state_dict(), "model.safetensors", metadata={"format": "pt"})
device_map = {"0": "cpu", "2": "disk", "3": "disk", "4": "cpu"}
with init_empty_weights():
    model = build()
assert load_checkpoint_in_model(model, "model.safetensors", device_map=device_map, offload_folder="offload") is None
assert "index.json" in os.listdir("offload")
assert model[2].weight.device.type == "meta"
assert model[3].running_mean.device.type == "cpu"
model = dispatch_model(model, device_map, offload_dir="offload")
x = torch.randn(3, 4)
assert torch.equal(model(x), plain(x))

with init_empty_weights():
    model = build()
load_checkpoint_in_model(model, ".", device_map={"": "cpu"}, dtype=torch.bfloat16)
assert model[0].weight.dtype == torch.bfloat16
assert model[3].num_batches_tracked.dtype == torch.int64
with init_empty_weights():
    model = build()
load_checkpoint_in_model(model, "model.safetensors", device_map={"": "cpu"}, dtype="float16", keep_in_fp32_modules=["2"])
assert (model[0].weight.dtype, model[2].weight.dtype) == (torch.float16, torch.float32)
