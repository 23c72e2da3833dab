"""The optimizer between accumulated batches, and with a gradient scaler."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from bigmodel.training.gradient_state import GradientState
from bigmodel.training.optimizer import AcceleratedOptimizer
from bigmodel.training.state import PartialState


def weight(value: float = 1.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor([value]))
    parameter.grad = torch.tensor([0.5])
    return parameter


def test_between_synchronizations_nothing_steps_and_gradients_stay() -> None:
    PartialState(cpu=True)
    parameter = weight()
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    GradientState()._set_sync_gradients(False)
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.item() == 1.0
    assert parameter.grad is not None
    GradientState()._set_sync_gradients(True)
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.item() == 0.5
    assert parameter.grad is None


def test_a_closure_is_called_and_its_loss_returned() -> None:
    PartialState(cpu=True)
    parameter = weight()
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    assert optimizer.step(lambda: 7.0) == 7.0


def test_it_is_the_optimizer_inside_for_all_else() -> None:
    PartialState(cpu=True)
    parameter = weight()
    inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    optimizer = AcceleratedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.step()
    assert calls == ["pre"]
    assert optimizer.state[parameter]["momentum_buffer"].item() == 0.5
    optimizer.add_param_group({"params": [weight()], "lr": 3.0})
    assert [group["lr"] for group in inner.param_groups] == [1.0, 3.0]
    other = AcceleratedOptimizer(torch.optim.SGD([weight(), weight()], lr=1.0))
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][1]
    state["param_groups"][0]["params"] = [0, 1]
    other.load_state_dict(state)
    assert other.optimizer.state_dict()["state"][0]["momentum_buffer"].item() == 0.5
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[1]["lr"] == 3.0


@pytest.mark.parametrize("fused", [False, True])
def test_steps_with_infinite_gradients_are_skipped_and_told(fused: bool) -> None:
    PartialState(cpu=True)
    parameter = weight()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0, fused=fused), scaler=scaler)
    scaler.scale((parameter * torch.tensor([float("inf")])).sum()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert parameter.item() == 1.0
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale((parameter * 0.25).sum()).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert parameter.item() == 0.75


def test_optimizers_with_two_modes_are_told() -> None:
    class TwoModes(torch.optim.SGD):
        mode = "train"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    PartialState(cpu=True)
    inner = TwoModes([weight()], lr=1.0)
    optimizer = AcceleratedOptimizer(inner)
    optimizer.eval()
    assert inner.mode == "eval"
    optimizer.train()
    assert inner.mode == "train"
    AcceleratedOptimizer(torch.optim.SGD([weight()], lr=1.0)).eval()


def test_state_moves_to_the_device(execution_device: torch.device) -> None:
    PartialState()
    parameter = weight()
    inner = torch.optim.Adam([parameter], lr=1.0)
    inner.step()
    parameter.data = parameter.data.to(execution_device)
    optimizer = AcceleratedOptimizer(inner)
    state = optimizer.state[parameter]
    assert state["exp_avg"].device == PartialState().device
    assert state["step"].device.type == "cpu"
