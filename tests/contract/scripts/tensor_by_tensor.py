"""The loop that loaders of their own run: an empty model, its tensors put one by one."""

import torch
from accelerate import init_empty_weights
from accelerate.utils import named_module_tensors, set_module_tensor_to_device
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


torch.manual_seed(0)
plain = build()
with init_empty_weights(include_buffers=True):
    model = build()
assert {tensor.device.type for _, tensor in named_module_tensors(model, recurse=True)} == {"meta"}
for name, value in plain.state_dict().items():
    set_module_tensor_to_device(model, name, "cpu", value=value)
x = torch.randn(3, 4)
assert torch.equal(model(x), plain(x))
set_module_tensor_to_device(model, "0.weight", "cpu", value=plain[0].weight, dtype=torch.float16)
assert model[0].weight.dtype == torch.float16
set_module_tensor_to_device(model, "0.weight", "meta")
assert (model[0].weight.device.type, model[0].weight.dtype) == ("meta", torch.float16)
for wrong in (
    lambda: set_module_tensor_to_device(model, "0.weight", "cpu"),
    lambda: set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.zeros(1)),
    lambda: set_module_tensor_to_device(model, "0.nothing", "cpu"),
):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("a ValueError was expected")
