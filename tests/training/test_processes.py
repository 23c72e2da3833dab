"""The processes that tests run functions in: what they return, and what comes of a rank that fails, ends or hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from processes import RankLost, RanksFailed

from bigmodel.training.state import PartialState


def ranks_and_sum(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    state = PartialState()
    return os.getpid(), state.process_index, total


def raise_in_rank_1(wait: bool) -> None:
    if dist.get_rank() == 1:
        raise KeyError("the name that rank 1 lacks")
    if wait:
        dist.barrier()


def end_in_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def sleep_in_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


def broadcast_alone() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def end_the_group() -> None:
    PartialState().destroy_process_group()


def fail_the_test() -> None:
    pytest.fail("these ranks are not equal")


def change_everything() -> None:
    PartialState()
    os.environ["BIGMODEL_DEBUG_MODE"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.rand(3)


def state_of_the_process() -> tuple[bool, bool, torch.dtype, float, str]:
    made = bool(PartialState._shared_state)
    return made, PartialState().debug, torch.get_default_dtype(), torch.rand(()).item(), os.environ["WORLD_SIZE"]


def returns_what_cannot_be_pickled() -> object:
    return lambda: None


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_rank_answers_and_the_processes_stay(processes, count) -> None:
    first = processes(count).run(ranks_and_sum, 10)
    second = processes(count).run(ranks_and_sum, offset=0)
    assert [rank for _, rank, _ in first] == list(range(count))
    assert [total.item() for *_, total in first] == [sum(range(count)) + 10 * count] * count
    assert [total.item() for *_, total in second] == [sum(range(count))] * count
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert len({pid for pid, *_ in first}) == count


def test_calls_do_not_see_each_other(processes) -> None:
    fresh = processes(2).run(state_of_the_process)
    processes(2).run(change_everything)
    assert processes(2).run(state_of_the_process) == fresh
    assert fresh[0] == (False, False, torch.float32, torch.rand((), generator=torch.Generator().manual_seed(0)).item(), "2")


@pytest.mark.parametrize("wait", [False, True])
def test_a_rank_that_raises_is_named_with_its_traceback(processes, monkeypatch, wait) -> None:
    monkeypatch.setattr("processes.GRACE_SECONDS", 0.5)
    with pytest.raises(RanksFailed, match="Rank 1: KeyError") as caught:
        processes(2).run(raise_in_rank_1, wait)
    assert set(caught.value.errors) == ({0, 1} if wait else {1})
    assert isinstance(caught.value.errors[1], KeyError)
    assert "in raise_in_rank_1" in str(caught.value)
    if wait:
        assert "Rank 0 did not end after rank 1 had failed" in str(caught.value)
        assert "in barrier" in str(caught.value)
    assert len(processes(2).run(ranks_and_sum, 0)) == 2


def test_a_rank_that_ends_is_named_with_its_exit_code(processes) -> None:
    outcomes = processes(2).outcomes(end_in_rank_0)
    assert isinstance(outcomes[0].error, RankLost)
    assert "rank 0 ended with exit code 7" in str(outcomes[0].error)
    assert len(processes(2).run(ranks_and_sum, 0)) == 2


def test_a_rank_that_hangs_is_killed_and_tells_where_it_was(processes) -> None:
    start = time.monotonic()
    outcomes = processes(2).outcomes(sleep_in_rank_1, timeout=1)
    assert time.monotonic() - start < 30
    assert outcomes[0].error is None
    assert str(outcomes[1].error) == "Rank 1 did not end within 1 seconds."
    assert "in sleep_in_rank_1" in outcomes[1].trace
    assert len(processes(2).run(ranks_and_sum, 0)) == 2


def test_a_collective_that_one_rank_calls_alone_is_its_own_calls_fault(processes) -> None:
    outcomes = processes(2).outcomes(broadcast_alone, timeout=1)
    assert any(isinstance(outcome.error, RankLost) for outcome in outcomes)
    assert len(processes(2).run(ranks_and_sum, 0)) == 2


def test_what_cannot_be_pickled_is_said(processes) -> None:
    with pytest.raises(RanksFailed, match="which cannot be sent"):
        processes(2).run(returns_what_cannot_be_pickled)


def test_a_call_may_end_the_group(processes) -> None:
    assert processes(2).run(end_the_group) == [None, None]
    assert len(processes(2).run(ranks_and_sum, 0)) == 2


def test_failures_of_pytest_are_failures(processes) -> None:
    with pytest.raises(RanksFailed, match="these ranks are not equal"):
        processes(2).run(fail_the_test)
