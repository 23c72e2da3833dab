"""The scheduler's steps: with the optimizer's, once for each process, and no further than its end."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau

from bigmodel.training.gradient_state import GradientState
from bigmodel.training.optimizer import AcceleratedOptimizer
from bigmodel.training.scheduler import AcceleratedScheduler
from bigmodel.training.state import PartialState


def optimizer_and_scheduler(make: Any, **kwargs: Any) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]:
    PartialState(cpu=True)
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    inner = torch.optim.SGD([parameter], lr=1.0)
    scheduler = make(inner)
    optimizer = AcceleratedOptimizer(inner)
    return optimizer, AcceleratedScheduler(scheduler, optimizer, **kwargs)


def rates(optimizer: AcceleratedOptimizer, scheduler: AcceleratedScheduler, syncs: list[bool]) -> list[float]:
    seen = []
    for sync in syncs:
        GradientState()._set_sync_gradients(sync)
        optimizer.step()
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    return seen


def test_it_steps_where_the_optimizer_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler runs ahead of its optimizer
        both = optimizer_and_scheduler(lambda inner: LambdaLR(inner, lambda n: 1 / (1 + n)))
        assert rates(*both, [False, True, False, True]) == [1.0, 0.5, 0.5, 1 / 3]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_by_itself_it_steps_at_every_call() -> None:
    both = optimizer_and_scheduler(lambda inner: LambdaLR(inner, lambda n: 1 / (1 + n)), step_with_optimizer=False)
    assert rates(*both, [False, True]) == [0.5, 1 / 3]


@pytest.mark.parametrize(("split", "expected"), [(False, [1 / 3, 1 / 5]), (True, [1 / 2, 1 / 3])])
def test_every_process_counts_unless_they_share_batches(split: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    both = optimizer_and_scheduler(lambda inner: LambdaLR(inner, lambda n: 1 / (1 + n)), split_batches=split)
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    assert rates(*both, [True, True]) == expected


def test_it_stops_at_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    both = optimizer_and_scheduler(lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=5))
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    seen = rates(*both, [True] * 5)
    assert seen[2] == seen[3] == seen[4] == pytest.approx(4e-6)


def test_batches_without_a_step_count_towards_the_end_where_asked() -> None:
    class Plugin:
        num_steps: int | None = 2
        adjust_scheduler = True
        sync_with_dataloader = True
        sync_each_batch = False

    for adjust, steps in ((True, 2), (False, 3)):
        GradientState._reset_state()
        Plugin.adjust_scheduler = adjust
        GradientState(Plugin())
        optimizer, scheduler = optimizer_and_scheduler(lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=4))
        rates(optimizer, scheduler, [False, True] * 4)
        assert scheduler.scheduler.last_epoch == steps


def test_looking_at_a_metric_is_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, scheduler = optimizer_and_scheduler(lambda inner: ReduceLROnPlateau(inner, patience=1, factor=0.5))
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 4)
    seen = []
    for loss in (1.0, 2.0, 2.0, 2.0):
        scheduler.step(loss)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [1.0, 1.0, 0.5, 0.5]


def test_a_skipped_step_is_no_step() -> None:
    optimizer, scheduler = optimizer_and_scheduler(lambda inner: LinearLR(inner, start_factor=0.5, total_iters=2))
    optimizer._stepped = False
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    optimizer._stepped = True
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.75]
    assert scheduler.state_dict()["last_epoch"] == 1
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 0})
    assert scheduler.last_epoch == 0
