"""Several processes: rank 0 reads, all get the values; what goes wrong on rank 0 is known to all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed
from processes import Processes
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError, MatchError
from bigmodel.loading import init_empty_weights, load_checkpoint_in_model, load_together


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


class Shaped(nn.Module):
    def __init__(self, width: int = 3, *, extra: bool = False, buffer: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4)
        self.second = nn.Linear(4, 2)
        if extra:
            self.extra = nn.Linear(3, 3)
        if buffer:
            self.register_buffer("table", torch.ones(3), persistent=False)
        self.register_buffer("scale", torch.ones(1))


def refuse_other_models(folder: str) -> None:
    """Every rank raises the same error, before anything is read, and keeps what it has."""
    rank = torch.distributed.get_rank()
    file = f"{folder}/shaped.safetensors"

    def on_meta() -> nn.Module:
        with init_empty_weights(include_buffers=True):
            return Shaped()

    others: list[tuple[Callable[[], nn.Module], list[str]]] = [
        (lambda: Shaped(extra=True), ["extra.weight", "extra.bias", "Rank 1"]),
        (lambda: Shaped(5), ["first.weight", "[4, 5]", "[4, 3]", "Rank 1"]),
        (lambda: nn.Sequential(nn.Linear(3, 4)), ["second.weight", "Rank 1"]),
        (on_meta, ["scale", "meta", "Rank 1"]),
    ]
    for build_other, words in others:
        model = Shaped() if rank != 1 else build_other()
        before = [(name, value, value.clone()) for name, value in model.state_dict().items()]
        with pytest.raises(MatchError) as caught:
            load_checkpoint_in_model(model, file if rank == 0 else "nowhere", broadcast_from_rank0=True)
        assert all(word in str(caught.value) for word in words), caught.value
        told: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, str(caught.value))
        assert len(set(told)) == 1
        after = model.state_dict()
        assert all(after[name].is_meta or torch.equal(after[name], copy) for name, _, copy in before)
    # On meta everywhere but on rank 0: a buffer that no file holds cannot be computed from what rank 0 sends.
    with init_empty_weights(include_buffers=rank != 0):
        model = Shaped(buffer=True)
    with pytest.raises(MatchError, match="table"):
        load_checkpoint_in_model(model, f"{folder}/whole.safetensors" if rank == 0 else "nowhere", broadcast_from_rank0=True)


def refuse_other_readings(folder: str) -> None:
    """Where each rank reads, what it reads has to be of the same dtype and for the same names in all of them."""
    rank = torch.distributed.get_rank()
    file = f"{folder}/whole.safetensors"
    wanted = torch.bfloat16 if rank == 1 else torch.float32
    model = Shaped()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MatchError, match=r"(?s)Rank 1.*first\.weight.*bfloat16.*float32"):
        load_together(model, file, dtype_of=lambda name, spec, found: wanted)
    with pytest.raises(MatchError, match=r"(?s)Rank 1.*scale"):  # kept by one, read by the other
        load_together(model, f"{folder}/shaped.safetensors" if rank == 1 else file)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Stateful(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: object) -> None:
        raise AssertionError("nothing is set in models that differ")


def refuse_other_ties_and_states(folder: str) -> None:
    rank = torch.distributed.get_rank()
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if rank == 1:
        tied[1].weight = tied[0].weight
    with pytest.raises(MatchError, match=r"Rank 1.*0\.weight is one tensor with 1\.weight, in rank 0's model with none other"):
        load_checkpoint_in_model(tied, f"{folder}/pair.safetensors", broadcast_from_rank0=True)
    stateful = nn.Sequential(nn.Linear(3, 3), (Stateful if rank == 1 else nn.Linear)(3, 3))
    with pytest.raises(MatchError, match=r"Rank 1.*1\._extra_state"):
        load_checkpoint_in_model(stateful, f"{folder}/pair.safetensors", broadcast_from_rank0=True)


@pytest.fixture
def shaped(tmp_path: Path) -> Path:
    state = {name: torch.full_like(value, 2.0) for name, value in Shaped().state_dict().items()}
    save_file(state, tmp_path / "whole.safetensors")
    del state["scale"]
    save_file(state, tmp_path / "shaped.safetensors")
    save_file(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict(), tmp_path / "pair.safetensors")
    return tmp_path


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("work", [refuse_other_models, refuse_other_readings, refuse_other_ties_and_states], ids=lambda work: work.__name__)
def test_models_that_differ_are_refused_everywhere(
    work: Callable[[str], None], count: int, shaped: Path, processes: Callable[[int], Processes]
) -> None:
    processes(count).run(work, str(shaped))
