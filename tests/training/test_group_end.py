"""A group ends once its threads hold nothing any more: those that still do when the interpreter ends would abort the process."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bigmodel.training import group_end
from bigmodel.training.state import PartialState


def ends_after_its_threads() -> list[str]:
    """One thread of a group is in a collective, then busy with what is asked of it there; the group is to end meanwhile."""
    order: list[str] = []
    group = dist.new_group(backend="gloo")
    if dist.get_rank():
        time.sleep(0.1)  # the other rank's thread is in the collective before this one comes
    tensor = torch.ones(1)
    reduced = weakref.ref(tensor)
    work = dist.all_reduce(tensor, group=group, async_op=True)

    def busy(_: object) -> None:
        time.sleep(0.2)
        order.append("at once" if threading.current_thread() is threading.main_thread() else "thread")

    work.get_future().then(busy)
    del tensor, work
    destroy = dist.destroy_process_group

    def noted(group: dist.ProcessGroup) -> None:
        order.append(f"destroyed {reduced()}")
        destroy(group)

    with mock.patch.object(group_end, "PATIENCE_SECONDS", 30.0), mock.patch.object(dist, "destroy_process_group", noted):
        PartialState().destroy_process_group(group)
    return order


def test_a_group_ends_after_its_threads_have_let_go(processes) -> None:
    assert processes(2).run(ends_after_its_threads)[0] == ["thread", "destroyed None"]


def is_left_in_its_collective() -> float:
    """Rank 0 alone calls it; rank 1 does, afterwards."""
    group = dist.new_group(backend="gloo")
    work = None if dist.get_rank() else dist.all_reduce(torch.ones(1), group=group, async_op=True)
    started = time.monotonic()
    with mock.patch.object(group_end, "PATIENCE_SECONDS", 0.05):
        if work is not None:
            blocked = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            group_end.settle_groups(group)
    waited = time.monotonic() - started
    dist.barrier()
    if work is None:
        for _ in range(2):
            dist.all_reduce(torch.ones(1), group=group)
    else:
        work.wait()
        blocked.wait()
    dist.destroy_process_group(group)
    return waited


def test_threads_in_a_collective_that_does_not_end_are_left_there(processes) -> None:
    assert processes(2).run(is_left_in_its_collective)[0] >= 0.05


def test_groups_end_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("destroyed"))
    monkeypatch.setattr(group_end, "settle_groups", lambda: order.append("settled"))
    monkeypatch.delattr(sys, "last_type", raising=False)
    group_end.end_groups()
    assert order == ["settled", "destroyed"]
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    group_end.end_groups()
    assert order == ["settled", "destroyed", "settled"]


def groups_come_and_go() -> int:
    """How many threads remain of ten groups that have ended one after the other."""
    counts = []
    for _ in range(10):
        group = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(3), group=group)
        PartialState().destroy_process_group(group)
        del group
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[-1] - counts[0]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs a system that lists the threads of a process")
def test_threads_of_groups_that_have_ended_are_gone(processes) -> None:
    assert max(processes(2).run(groups_come_and_go)) <= 0
