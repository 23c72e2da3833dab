"""Several processes: rank 0 reads, all get the values; what goes wrong on rank 0 is known to all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from processes import Processes
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import init_empty_weights, load_checkpoint_in_model


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def load_all(folder: str) -> None:
    # Rank 1 has no files.
    checkpoint = f"{folder}/right.safetensors" if torch.distributed.get_rank() == 0 else f"{folder}/nowhere"
    for model in (build(), _empty()):
        load_checkpoint_in_model(model, checkpoint, broadcast_from_rank0=True)
        assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in model.state_dict().values())
    try:
        load_checkpoint_in_model(build(), f"{folder}/wrong.safetensors", broadcast_from_rank0=True)
    except CheckpointError as error:
        assert "1.bias" in str(error)  # noqa: PT017 - this is no test function, but a process of one
    else:
        raise AssertionError("a missing tensor was not noticed")


def _empty() -> nn.Module:
    with init_empty_weights():
        return build()


def test_rank_0_reads_for_all(tmp_path: Path, processes: Callable[[int], Processes]) -> None:
    state = {name: torch.full_like(value, 2.0) for name, value in build().state_dict().items()}
    save_file(state, tmp_path / "right.safetensors")
    del state["1.bias"]
    save_file(state, tmp_path / "wrong.safetensors")
    processes(2).run(load_all, str(tmp_path))
