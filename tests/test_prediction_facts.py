"""What predictions take for granted of the dispatch, seen at a dispatched model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.dispatch import dispatched
from bigmodel.planning.cost import Moving


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file(Chain().to(torch.bfloat16).state_dict(), file)
    return file


def offloaded(checkpoint: Path, dtype: torch.dtype) -> list[int]:
    """Bytes that each group of a model on disk copies into memory of its own, on the CPU."""
    with bigmodel.init_empty_weights():
        model = Chain().to(dtype)
    model = bigmodel.load_checkpoint_and_dispatch(model, checkpoint, device_map={"": "disk"}, dtype=dtype)
    model(torch.ones(1, 64, dtype=dtype))
    state = dispatched(model)
    assert state is not None
    return [group.nbytes for group in state.schedule.groups]


def test_on_the_cpu_weights_on_disk_are_used_in_place_unless_they_are_converted(checkpoint: Path):
    assert Moving().maps_files is (sum(offloaded(checkpoint, torch.bfloat16)) == 0)
    assert sum(offloaded(checkpoint, torch.float32)) > 0
