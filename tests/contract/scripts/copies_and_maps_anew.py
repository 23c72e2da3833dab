"""A dispatched model is copied, freed of its hooks, and dispatched to one device."""

import copy

import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
x = torch.randn(2, 3)
expected = model(x)
dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir="offload")
copied = copy.deepcopy(model)
assert torch.equal(copied(x), expected)
assert copied[1].forward is not model[1].forward
message = ""
try:
    model.to("cpu")
except RuntimeError as error:
    message = str(error)
assert "You can't move a model that has some modules offloaded to cpu or disk" in message
remove_hook_from_submodules(model)
assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
model.to("cpu")
assert torch.equal(model(x), expected)
dispatch_model(model, {"": "cpu"}, force_hooks=True)
assert hasattr(model, "_hf_hook")
assert model.hf_device_map == {"": "cpu"}
assert torch.equal(model(x), expected)
assert torch.equal(copied(x), expected)
