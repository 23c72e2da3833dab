"""Adapters put into a dispatched base get the gradients that they get on a plain one."""

import copy

import torch
from accelerate import dispatch_model
from torch import nn


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


torch.manual_seed(0)
base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).requires_grad_(False)
x = torch.randn(3, 4)
plain, model = copy.deepcopy(base), copy.deepcopy(base)
dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir="offload")
for target in (plain, model):
    torch.manual_seed(1)
    target[0], target[2] = Adapter(target[0]), Adapter(target[2])
    target(x).pow(2).sum().backward()
for name, parameter in plain.named_parameters():
    if "base" not in name:
        assert torch.allclose(model.get_parameter(name).grad, parameter.grad, atol=1e-5), name
torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1).step()
assert not torch.equal(model(x), plain(x))
