"""A convolutional network with statistics, all of it on disk, over several batches."""

import torch
from accelerate import disk_offload
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
model(torch.randn(4, 3, 8, 8))  # gives the statistics values
model.eval()
batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
with torch.no_grad():
    expected = [model(batch) for batch in batches]
    disk_offload(model, "offload", execution_device="cpu", offload_buffers=True)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert all(torch.allclose(model(batch), output, atol=1e-6) for batch, output in zip(batches, expected, strict=True))
