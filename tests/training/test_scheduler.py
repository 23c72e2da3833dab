"""The scheduler's steps: with the optimizer's, once for each process, and no further than its end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from bigmodel import Accelerator
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.optimizer import AcceleratedOptimizer
from bigmodel.training.scheduler import AcceleratedScheduler
from bigmodel.training.state import PartialState
from bigmodel.utils import GradientAccumulationPlugin


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


def test_it_takes_all_its_steps_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    both = optimizer_and_scheduler(lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=5))
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    seen = rates(*both, [True] * 5)
    alone = optimizer_and_scheduler(lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=5))
    each = rates(*alone[:1], alone[1].scheduler, [True] * 5)
    assert seen == [each[1], each[3], each[4], each[4], each[4]]
    assert both[1].last_epoch == 5


def test_it_goes_on_from_a_state_whose_steps_were_counted_otherwise() -> None:
    first, second = (optimizer_and_scheduler(lambda inner: OneCycleLR(inner, max_lr=1.0, total_steps=6)) for _ in range(2))
    rates(*first, [True] * 2)
    second[1].load_state_dict(first[1].state_dict() | {"_step_count": 9})
    assert rates(*second, [True] * 4) == rates(*first, [True] * 4)
    assert second[1].last_epoch == 6


def regression() -> tuple[nn.Linear, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.2), list(torch.randn(8, 2))


def trained_plainly(total_steps: int, accumulated: int, at_once: int = 1) -> tuple[list[float], list[float]]:
    """The rates after each step, and the weights. `at_once`: processes, of which each step of the optimizer sees that many batches."""
    model, optimizer, data = regression()
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=total_steps)
    seen = []
    for group in torch.stack(data).split(accumulated * at_once):
        for batch in group.split(at_once):
            (model(batch).square().mean() / accumulated).backward()
        optimizer.step()
        for _ in range(at_once):
            if scheduler.last_epoch < total_steps:
                scheduler.step()
        optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])
    return seen, model.weight.detach().flatten().tolist()


def trained(total_steps: int, accumulated: int, adjust: bool) -> tuple[list[float], list[float]]:
    plugin = GradientAccumulationPlugin(num_steps=accumulated, adjust_scheduler=adjust)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, optimizer, data = regression()
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=total_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1), scheduler)
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.append(scheduler.get_last_lr()[0])
    return seen, accelerator.unwrap_model(model).weight.detach().flatten().tolist()


@pytest.mark.parametrize("adjust", [True, False])
@pytest.mark.parametrize(
    ("total_steps", "accumulated"),
    [(8, 1), (9, 1), (4, 2), (5, 2), (8, 2), (2, 4), (8, 4), (3, 3)],  # as many as the optimizer's steps, as batches, and others
)
def test_one_process_is_the_plain_loop(total_steps: int, accumulated: int, adjust: bool) -> None:
    assert trained(total_steps, accumulated, adjust) == trained_plainly(total_steps, accumulated)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("adjust", [True, False])
def test_two_processes_step_for_the_batches_of_both(processes: Callable[[int], Processes], adjust: bool) -> None:
    for total_steps, accumulated in ((8, 1), (4, 2), (5, 2), (8, 2), (2, 4), (10, 2)):
        expected_rates, expected_weights = trained_plainly(total_steps, accumulated, at_once=2)
        for seen, weights in processes(2).run(trained, total_steps, accumulated, adjust):
            assert seen == expected_rates
            torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


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
