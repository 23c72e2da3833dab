"""What image pipelines do with their models: every submodule offloaded from one state dict, with its buffers."""

import torch
from accelerate import cpu_offload
from torch import nn


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        h = self.down(x)
        tokens = h.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        return self.up(tokens.transpose(1, 2).reshape(h.shape))


torch.manual_seed(0)
unet = UNet().eval()
x = torch.randn(1, 3, 8, 8)
with torch.no_grad():
    expected = unet(x)
    classes = ["MultiheadAttention"]
    has_own = len(unet._parameters) > 0
    cpu_offload(unet, torch.device("cpu"), offload_buffers=has_own, state_dict=unet.state_dict(), preload_module_classes=classes)
    assert {parameter.device.type for parameter in unet.parameters()} == {"meta"}
    for _ in range(3):
        assert torch.allclose(unet(x), expected, atol=1e-5)
