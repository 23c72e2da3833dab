"""Optimizers that step in their backward: called once for a batch, and refused where gradients would have to be kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model
from bigmodel.errors import TrainingError
from bigmodel.training.accelerator import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.optimizer import AcceleratedOptimizer


class FusedSGD(torch.optim.SGD):
    """As lomo_optim's optimizers are: parameters are updated by hooks while the backward runs, and `step` is not theirs."""

    def __init__(self, model: nn.Module):
        super().__init__(model.parameters(), lr=0.0)
        self.rate = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=self.rate)
        parameter.grad = None

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        self.rate = lr
        loss.backward()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def job(**arguments: Any) -> tuple[Accelerator, nn.Module, AcceleratedOptimizer]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Linear(3, 1)
    return accelerator, *accelerator.prepare(model, FusedSGD(model))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(6.0).view(2, 3)).square().mean()


def test_a_loop_steps_in_its_backward() -> None:
    accelerator, model, optimizer = job()
    expected = nn.Linear(3, 1)
    expected.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(expected.parameters(), lr=0.01)
    for _ in range(3):
        loss_of(expected).backward()
        plain.step()
        plain.zero_grad()
    accelerator.lomo_backward(loss_of(model), 0.01)
    for _ in range(2):  # as transformers' Trainer does it
        accelerator.backward(loss_of(model), learning_rate=0.01)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, expected.weight)
    assert model.weight.grad is None


def test_what_would_keep_gradients_is_refused() -> None:
    accelerator, model, _ = job(gradient_accumulation_steps=2)
    with pytest.raises(TrainingError, match="gradient_accumulation_steps=2"):
        accelerator.lomo_backward(loss_of(model), 0.01)
    accelerator, model, _ = job(mixed_precision="fp16")
    with pytest.raises(TrainingError, match="unscaled for mixed_precision='fp16': use 'bf16'"):
        accelerator.lomo_backward(loss_of(model), 0.01)
    accelerator, model, _ = job()
    accelerator.free_memory()
    with pytest.raises(TrainingError, match=r"0 of the prepared optimizers.*Lomo or AdaLomo of lomo_optim \(pip install lomo-optim\)"):
        accelerator.backward(loss_of(model), learning_rate=0.01)


def test_whether_a_model_is_spread_is_told() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not accelerator.verify_device_map(model)
    model[1] = dispatch_model(model[1], {"0": "cpu:resident", "1": "cpu"}, main_device="cpu")
    assert accelerator.verify_device_map(model)
    assert not accelerator.verify_device_map(model[0])
