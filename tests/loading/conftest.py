"""What the loading tests share: small models, their checkpoints in every form, and tensors read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn


class Tied(nn.Module):
    """An embedding, a block with buffers, and a head that shares the embedding's weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, dtype=dtype)
        self.block = nn.Sequential(nn.Linear(16, 24, dtype=dtype), nn.BatchNorm1d(24, dtype=dtype), nn.Linear(24, 16, dtype=dtype))
        self.register_buffer("steps", torch.arange(3), persistent=True)
        self.register_buffer("rotary", torch.linspace(0, 1, 5), persistent=False)
        self.head = nn.Linear(16, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


@pytest.fixture
def tied() -> type[Tied]:
    return Tied


@pytest.fixture
def filled() -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return model


@pytest.fixture
def saved(filled: nn.Module, tmp_path: Path) -> Path:
    """The model's state dict in one safetensors file, the tied weight under the embedding's name alone."""
    state = {name: value.clone() for name, value in filled.state_dict().items() if name != "head.weight"}
    folder = tmp_path / "saved"
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def write_raw() -> Callable[..., Path]:
    """Writes a safetensors file from a header and bytes, however wrong."""

    def write(file: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        return file

    return write
