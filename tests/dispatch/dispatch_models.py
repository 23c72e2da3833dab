"""Small models and a file-backed store for the tests of dispatch."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bigmodel.protocols import Read, TensorSpec


class FileStore:
    """Every tensor in a file of its own; counts what is read. What is written is kept beside the files."""

    kind = "disk"

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self._specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self._folder = folder
        self._written: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.reads: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors.items():
            torch.save(tensor.detach().cpu().contiguous(), folder / f"{name}.pt")

    def names(self) -> Collection[str]:
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def _load(self, name: str) -> torch.Tensor:
        return self._written[name] if name in self._written else torch.load(self._folder / f"{name}.pt")

    def _count(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
            self.reads.append(name)

    def read_into(self, reads: Sequence[Read]) -> None:
        for read in reads:
            value = self._load(read.name)
            self._count(read.name, value.numel() * value.element_size())
            read.destination.copy_(value)

    def read_rows(self, name: str, rows: torch.Tensor, destination: torch.Tensor) -> None:
        value = self._load(name)[rows]
        self._count(f"{name}[rows]", value.numel() * value.element_size())
        destination.copy_(value)

    def write(self, name: str, value: torch.Tensor) -> None:
        self._written[name] = value.detach().cpu().to(self._specs[name].dtype, copy=True)


class Block(nn.Module):
    """A residual block that reads one child's weight without calling the child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(F.linear(self.norm(x), self.up.weight, self.up.bias)))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, head tied to the embedding, and a buffer of each kind."""

    def __init__(self, width: int = 8, depth: int = 4, tie: bool = True, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(vocabulary), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale + self.shift


def tiny(**arguments: int | bool) -> tuple[TinyModel, torch.Tensor, torch.Tensor]:
    """A model in eval mode, ids for it, and the plain model's output."""
    torch.manual_seed(0)
    model = TinyModel(**arguments).eval()
    ids = torch.randint(0, 20, (2, 5))
    with torch.no_grad():
        return model, ids, model(ids)
