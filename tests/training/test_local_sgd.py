"""Local SGD: apart between averages, together after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from processes import Processes
from torch import nn

from bigmodel import Accelerator, LocalSGD, TrainingError

Sizes = Callable[[int], Processes]
RATE = 0.5


def weights(enabled: bool) -> list[list[float]]:
    """The weight after each of three steps, and on leaving; the gradient of every step is rank + 1."""
    accelerator = Accelerator(cpu=True)
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.0)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=RATE))
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=enabled) as local:
        for _ in range(3):
            accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append([layer.weight.item()])
    seen.append([layer.weight.item()])
    return seen


def test_weights_are_averaged_every_few_steps_and_at_the_end(processes: Sizes) -> None:
    first, second = processes(2).run(weights, True)
    mean = -RATE * 2 * 1.5
    assert first == [[-RATE], [mean], [mean - RATE], [mean - RATE * 1.5]]
    assert second == [[-RATE * 2], [mean], [mean - RATE * 2], [mean - RATE * 1.5]]


def test_disabled_it_changes_nothing(processes: Sizes) -> None:
    expected = [[-RATE * 1.5 * step] for step in (1, 2, 3, 3)]
    assert processes(2).run(weights, False) == [expected, expected]


def test_one_process_has_nothing_to_average() -> None:
    assert weights(True) == [[-RATE * step] for step in (1, 2, 3, 3)]


def test_fewer_than_one_step_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TrainingError, match="local_sgd_steps=0"):
        LocalSGD(accelerator, nn.Linear(1, 1), 0)
