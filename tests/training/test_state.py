"""One process, and what the launcher's numbers make of it."""

from __future__ import annotations

import pytest
import torch

from bigmodel.errors import TrainingError
from bigmodel.training.enums import DistributedType, PrecisionType
from bigmodel.training.state import PartialState


def test_one_process_is_the_first_and_the_last() -> None:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type == DistributedType.NO == "NO"
    assert state.device == torch.device("cpu")
    assert PartialState().__dict__ is state.__dict__
    state.wait_for_everyone()
    with state.split_between_processes([1, 2, 3]) as share:
        assert share == [1, 2, 3]


def test_ranks_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="rank 3 of 2"):
        PartialState()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TrainingError, match="MASTER_ADDR"):
        PartialState()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(TrainingError, match="WORLD_SIZE is 'many'"):
        PartialState()


def test_words_are_their_values() -> None:
    assert "bf16" in PrecisionType
    assert "bf17" not in PrecisionType
    assert str(PrecisionType.BF16) == "bf16"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
