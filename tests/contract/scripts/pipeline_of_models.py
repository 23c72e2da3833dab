"""A pipeline whose models take turns on the device, and whose middle one runs in a loop."""

import torch
from accelerate import cpu_offload_with_hook
from torch import nn

torch.manual_seed(0)
encoder, denoiser, decoder = (nn.Linear(4, 4) for _ in range(3))
x = torch.randn(2, 4)


def run():
    hidden = encoder(x)
    for _ in range(3):
        hidden = denoiser(hidden)
    return decoder(hidden)


expected = run()
device = torch.device("cpu")
hook = None
for model in (encoder, denoiser, decoder):
    _, hook = cpu_offload_with_hook(model, device, prev_module_hook=hook)
for _ in range(2):
    assert torch.equal(run(), expected)
    hook.offload()
assert decoder.weight.device.type == "cpu"
assert hook.model is decoder
assert hook.hook is decoder._hf_hook
hook.remove()
assert not hasattr(decoder, "_hf_hook")
assert torch.equal(run(), expected)
