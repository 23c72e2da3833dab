"""Saving holds one tensor at a time, in either format, for models whose weights are fetched, tied and aliased."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.constants import MiB
from bigmodel.loading import init_empty_weights, save_model
from bigmodel.measure import PeakPrivateMemory

LAYERS = 24


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(1024, 1024, bias=False)
        self.head.weight = self.layers[0].weight


def values_of(name: str) -> torch.Tensor:
    """In memory of its own, which goes back to the system with it: what an allocator keeps for later is not what is measured."""
    memory = mmap.mmap(-1, 4 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = torch.frombuffer(memory, dtype=torch.float32).view(1024, 1024)
    return values.fill_(float(name.split(".")[1]) if name.startswith("layers") else 0.0)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("max_shard_size", [10**9, 20 * MiB])
def test_one_tensor_at_a_time(safe: bool, max_shard_size: int, tmp_path: Path) -> None:
    with init_empty_weights():
        model = Tower()
    save_model(model, tmp_path / "first", max_shard_size, safe, fetch=values_of)  # imports and caches are not what is measured
    alive: list[int] = []

    def fetch(name: str) -> torch.Tensor:
        alive.append(1)
        return values_of(name)

    with PeakPrivateMemory(interval_seconds=0.001) as memory:
        files = save_model(model, tmp_path / "folder", max_shard_size, safe, fetch=fetch)
    assert len(alive) == LAYERS
    assert memory.peak_bytes < 16 * MiB  # 96 MiB in all
    state: dict[str, torch.Tensor] = {}
    for file in files:
        if safe:
            continue
        state |= torch.load(file, weights_only=True)
    for name, value in state.items():
        assert torch.equal(value, values_of(name)), name
    if not safe:
        assert state.keys() == model.state_dict().keys()
        assert any(state["head.weight"] is value or torch.equal(state["head.weight"], value) for value in state.values())
