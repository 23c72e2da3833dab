"""Small models that the planning tests share."""

from __future__ import annotations

import torch
from torch import nn

from bigmodel.device_map import device_for


class Block(nn.Module):
    """A residual block of two square matrices, 8 × width² bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, on meta: shapes are all that planning looks at."""

    def __init__(self, blocks: int = 10, width: int = 16, vocabulary: int = 64, *, tied: bool = False) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList([Block(width) for _ in range(blocks)])
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def bytes_on(model: nn.Module, device_map: dict[str, int | str], device: int | str) -> int:
    """Bytes of the distinct tensors that the map puts on `device`."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(tensor.nbytes for name, tensor in tensors if device_for(name, device_map) == device)
