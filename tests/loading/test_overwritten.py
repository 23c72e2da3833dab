"""A file that is written to while it is read: an error that names it, and a model that is what it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, init_empty_weights, load, load_checkpoint_in_model

LAYERS = 8


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"{n}.weight": torch.full((512, 512), value) for n in range(LAYERS)}


def empty(dtype: torch.dtype = torch.float32) -> nn.Module:
    with init_empty_weights():
        return nn.Sequential(*[nn.Linear(512, 512, bias=False, dtype=dtype) for _ in range(LAYERS)])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that another one of its size is written over after the first read of its values."""
    file = tmp_path / "model.safetensors"
    save_file(state(2.0), file)
    other = file.read_bytes()
    save_file(state(1.0), file)
    os.utime(file, (1, 1))
    real = os.preadv
    done = False

    def read(*arguments: Any) -> int:
        nonlocal done
        count = real(*arguments)
        if not done:
            done = True
            with file.open("r+b") as opened:
                opened.write(other)
        return count

    monkeypatch.setattr(os, "preadv", read)
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reading", ["auto", "buffered", "direct"])
def test_load(file: Path, dtype: torch.dtype, reading: Any) -> None:
    model = empty(dtype)
    checkpoint = Checkpoint.open(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*written to"):
        load(model, checkpoint, reading=reading)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint_in_model(model, file)
    assert {parameter.unique().item() for parameter in model.parameters()} == {2.0}


def test_packing_keeps_nothing(file: Path, tmp_path: Path) -> None:
    model = empty()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*written to"):
        bigmodel.load_checkpoint_and_dispatch(model, file, {"": "cpu"}, quantization="fp8", packed_cache=tmp_path / "packed")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
