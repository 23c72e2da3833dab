"""Offloaded, run, hooks taken off, moved, run, offloaded again."""

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
x = torch.randn(2, 3)
expected = model(x)
cpu_offload(model, execution_device=torch.device("cpu"))
assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
assert torch.allclose(model(x), expected, atol=1e-5)
remove_hook_from_submodules(model)
assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
model.to("cpu")
assert torch.allclose(model(x), expected, atol=1e-5)
cpu_offload(model, execution_device="cpu", offload_buffers=True)
assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
assert torch.allclose(model(x), expected, atol=1e-5)
assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
