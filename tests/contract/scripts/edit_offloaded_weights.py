"""Reading weights of offloaded modules, as adapter and training libraries do."""

import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import align_module_device, has_offloaded_params
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
weight = model[0].weight.detach().clone()
cpu_offload(model)
assert [has_offloaded_params(module) for module in model] == [True, True]
assert not has_offloaded_params(nn.Linear(1, 1))
with align_module_device(model[0], "cpu"):
    assert torch.equal(model[0].weight, weight)
    assert model[0].weight.device.type == "cpu"
assert model[0].weight.device.type == "meta"
hook = model[0]._hf_hook
assert isinstance(hook, AlignDevicesHook)
assert hook.offload
assert torch.equal(hook.weights_map["weight"], weight)
