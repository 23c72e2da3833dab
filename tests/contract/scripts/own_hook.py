"""Hooks that users write: added, appended, replaced, removed; beside one that offloads."""

import inspect

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from torch import nn


class PlusOne(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs


class Frozen(ModelHook):
    no_grad = True


torch.manual_seed(0)
module = nn.Linear(3, 3)
x = torch.randn(2, 3)
plain, once, twice = module(x), module(x + 1), module(x + 1 + 1)
add_hook_to_module(module, PlusOne())
assert torch.equal(module(x), once)
assert list(inspect.signature(module.forward).parameters) == ["input"]
add_hook_to_module(module, PlusOne(), append=True)
assert isinstance(module._hf_hook, SequentialHook)
assert torch.equal(module(x), twice)
add_hook_to_module(module, Frozen())
assert not module(x).requires_grad
remove_hook_from_module(module)
assert not hasattr(module, "_hf_hook")
assert module(x).requires_grad

add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True))
assert module.weight.device.type == "meta"
assert torch.equal(module(x), plain)
assert module._hf_hook.weights_map["weight"].shape == (3, 3)
assert module.weight.device.type == "meta"
remove_hook_from_module(module)
assert module.weight.device.type == "cpu"
assert torch.equal(module(x), plain)
