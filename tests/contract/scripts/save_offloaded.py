"""An offloaded model's state dict, saved, and loaded by plain torch."""

import torch
from accelerate import cpu_offload, disk_offload
from accelerate.utils.modeling import get_state_dict_offloaded_model
from safetensors.torch import load_file, save_file
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 3), nn.ReLU()))


torch.manual_seed(0)
model = build()
expected = {name: value.clone() for name, value in model.state_dict().items()}
for way in ("cpu", "disk"):
    model = build()
    model.load_state_dict(expected)
    if way == "cpu":
        cpu_offload(model)
    else:
        disk_offload(model, "offload", offload_buffers=True)
    state = get_state_dict_offloaded_model(model)
    assert sorted(state) == sorted(expected)
    assert {value.device.type for value in state.values()} == {"cpu"}
    save_file(state, "saved.safetensors")
    torch.save(state, "saved.bin")
    again = build()
    again.load_state_dict(load_file("saved.safetensors"))
    again.load_state_dict(torch.load("saved.bin", weights_only=True))
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
