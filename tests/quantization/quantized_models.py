"""A small model of blocks with a checkpoint, and what bitsandbytes' own layers make of it."""

from __future__ import annotations

import copy
import ctypes
import gc
from pathlib import Path

import bitsandbytes
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.quantization import BnbQuantizationConfig, select

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(24).view(2, 12)


def saved_net(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A net with its checkpoint in `folder`."""
    torch.manual_seed(0)
    net = Net().to(dtype).eval()
    save_file(net.state_dict(), folder / "model.safetensors")
    return net


def empty_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return Net().to(dtype).eval()


def return_free_memory() -> None:
    """Gives what this process has freed back to the system, so that what is taken from now on is seen as taken."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def with_bitsandbytes(net: nn.Module, config: BnbQuantizationConfig) -> nn.Module:
    """A copy of the net in which bitsandbytes' own layers stand, made and packed as its documentation says."""
    dtype = config.torch_dtype
    net = copy.deepcopy(net).to(dtype)
    for name, linear in select(net).packed.items():
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        if config.load_in_8bit:
            layer = bitsandbytes.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=config.llm_int8_threshold)
        else:
            layer = bitsandbytes.nn.Linear4bit(
                *shape,
                compute_dtype=config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
            layer.support_avx512bf16_for_cpu = False  # that path rounds the scales of the weights in the first forward
        layer.weight.data = linear.weight.detach().clone()
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone())
        parent, _, attribute = name.rpartition(".")
        net.get_submodule(parent).add_module(attribute, layer.to("cpu"))
    return net.eval()
