"""Layers that rest in eight bits and compute in 32."""

import torch
from accelerate.big_modeling import attach_layerwise_casting_hooks
from torch import nn

torch.manual_seed(0)
for storage in (torch.float16, torch.float8_e4m3fn):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    rounded = [module.weight.detach().to(storage).float() for module in (model[0], model[2])]
    attach_layerwise_casting_hooks(model, storage_dtype=storage, compute_dtype=torch.float32, skip_modules_pattern=["norm"])
    assert [parameter.dtype for parameter in model.parameters()] == [storage] * 2 + [torch.float32] * 2 + [storage] * 2
    assert model(torch.randn(2, 3)).dtype == torch.float32
    assert [parameter.dtype for parameter in model.parameters()] == [storage] * 2 + [torch.float32] * 2 + [storage] * 2
    assert all(torch.equal(module.weight.detach().float(), value) for module, value in zip((model[0], model[2]), rounded, strict=True))
