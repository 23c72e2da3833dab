"""Hooks attached by hand over an offload folder, folders used again, and a hook whose two halves are called by hand."""

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook_on_blocks, remove_hook_from_submodules
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear2(self.batchnorm(self.linear1(x)))


def build(training=False):
    model = Model().train(training)
    model.load_state_dict(state)
    return model


torch.manual_seed(0)
state = {name: value.clone() for name, value in Model().state_dict().items()}
x = torch.randn(2, 3)
expected = build()(x)
offload_state_dict("offload", state)
weights = OffloadedWeightsLoader(save_folder="offload")

model = build()
attach_align_device_hook_on_blocks(
    model,
    execution_device={"": "cpu", "linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"},
    offload={"": False, "linear1": True, "batchnorm": False, "linear2": True},
    weights_map=weights,
)
assert [parameter.device.type for parameter in model.parameters()] == ["meta", "meta", "cpu", "cpu", "meta", "meta"]
assert torch.equal(model(x), expected)
remove_hook_from_submodules(model)
assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
assert torch.equal(model(x), expected)

assert torch.equal(cpu_offload(build(), state_dict=weights)(x), expected)
model = disk_offload(build(), "another")
assert torch.equal(model(x), expected)
remove_hook_from_submodules(model)
assert torch.equal(disk_offload(model, "another", offload_buffers=True)(x), expected)
device_map = {"linear1": "disk", "batchnorm": "disk", "linear2": "disk"}
assert torch.equal(dispatch_model(build(), device_map, offload_dir="offload", offload_buffers=True)(x), expected)

hook = AlignDevicesHook(execution_device="cpu", offload=True, offload_buffers=True)
module = add_hook_to_module(nn.BatchNorm1d(2), hook)
assert sorted(hook.weights_map) == ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
assert set(hook.original_devices.values()) == {torch.device("cpu")}
args, kwargs = hook.pre_forward(module, x, other=x)
assert (len(args), list(kwargs), module.weight.device.type) == (1, ["other"], "cpu")
assert hook.post_forward(module, x) is x
assert module.weight.device.type == "meta"

model, plain = cpu_offload(build(training=True)), build(training=True)
with torch.no_grad():
    assert torch.allclose(model(x), plain(x), atol=1e-5)
assert torch.allclose(model.batchnorm.running_mean, plain.batchnorm.running_mean)
assert model.batchnorm.num_batches_tracked == 1
