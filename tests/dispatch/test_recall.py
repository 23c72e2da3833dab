"""Gradients flow through offloaded weights without keeping them in memory; the weights themselves are frozen, and that is said."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from dispatch_models import FileStore
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigmodel.dispatch import dispatch, placement, update_parameter
from bigmodel.errors import DispatchError


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, through=lambda block, x: block(x)) -> torch.Tensor:
        for block in self.blocks:
            x = through(block, x)
        return self.head(x)


def offloaded(tmp_path, device: torch.device) -> tuple[Model, Model]:
    """The plain model, and the same with its blocks on disk."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    store = FileStore(tmp_path, dict(model.state_dict()))
    home = "cpu" if device.type == "cpu" else device.index
    dispatch(model, {"blocks": "disk", "head": home}, main_device=device, store=store, prefetch=True)
    return plain, model


def gradients(model: Model, x: torch.Tensor, through=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    output = model(x) if through is None else model(x, through)
    output.pow(2).sum().backward()
    return output.detach().cpu(), x.grad, model.head.weight.grad.cpu()


def test_gradients_of_inputs_and_resident_weights_are_the_plain_models(tmp_path, execution_device):
    plain, model = offloaded(tmp_path, execution_device)
    x = torch.randn(5, 64)
    for own, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_with_checkpointing(tmp_path, execution_device, reentrant):
    plain, model = offloaded(tmp_path, execution_device)
    x = torch.randn(5, 64)

    def through(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)

    for own, theirs in zip(gradients(model, x, through), gradients(plain, x), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_checkpoints_its_own_forward(tmp_path, execution_device, reentrant, monkeypatch):
    """The hooks of the block are outside then, as in transformers: the backward reads weights that nobody brings."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(functools.partial(own, self), x, use_reentrant=reentrant)

    own = Block.forward
    monkeypatch.setattr(Block, "forward", forward)
    plain, model = offloaded(tmp_path, execution_device)
    x = torch.randn(5, 64)
    for own_gradient, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(own_gradient, theirs)
    assert placement(model).outside_reads == {}


def test_saved_tensor_hooks_around_the_model_get_the_activations(tmp_path, execution_device):
    plain, model = offloaded(tmp_path, execution_device)
    x = torch.randn(5, 64)
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        own = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(own, gradients(plain, x), strict=True))
    assert torch.Size([5, 64]) in seen
    assert torch.Size([128, 64]) not in seen


def test_what_passed_through_is_not_kept_for_the_backward(tmp_path, accelerators):
    device = accelerators(1, memory="64MiB")[0]
    _, model = offloaded(tmp_path, device)
    x = torch.randn(5, 64)
    with torch.no_grad():
        model(x)
    before = torch.accelerator.memory_allocated(device)
    output = model(x.requires_grad_())
    kept = torch.accelerator.memory_allocated(device) - before
    assert kept < 6 * 2 * 64 * 128 * 4 / 3  # activations, far less than the weights of six blocks
    output.sum().backward()
    assert x.grad is not None


def test_adapters_inside_offloaded_blocks_learn(tmp_path, execution_device):
    plain, model = offloaded(tmp_path, execution_device)
    torch.manual_seed(1)
    low = nn.Linear(64, 128, bias=False)
    for each in (plain, model):
        adapter = Adapter(each.blocks[2].up)
        adapter.low.load_state_dict(low.state_dict())
        each.blocks[2].up = adapter
    x = torch.randn(5, 64)
    gradients(model, x)
    gradients(plain, x)
    assert torch.equal(model.blocks[2].up.low.weight.grad.cpu(), plain.blocks[2].up.low.weight.grad)


def test_a_weight_that_is_changed_before_the_backward_is_refused(tmp_path):
    _, model = offloaded(tmp_path, torch.device("cpu"))
    output = model(torch.randn(5, 64, requires_grad=True))
    update_parameter(model, "blocks.3.up.weight", torch.zeros(128, 64))
    with pytest.raises(DispatchError, match=r"blocks\.3\."):
        output.sum().backward()


def test_frozen_weights_are_told_once(tmp_path, execution_device, caplog):
    _, model = offloaded(tmp_path, execution_device)
    with caplog.at_level(logging.WARNING, logger="bigmodel"):
        for _ in range(2):
            model(torch.randn(5, 64))
    assert sum("offloaded weights are frozen" in record.message for record in caplog.records) == 1


def test_activations_changed_in_place_are_still_noticed(tmp_path):
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(self.linear(x))

    model = nn.Sequential(Exp(), nn.Linear(4, 4))
    dispatch(model, {"0": "disk", "1": "cpu"}, main_device=torch.device("cpu"), store=FileStore(tmp_path, dict(model.state_dict())))
    x = torch.randn(2, 4, requires_grad=True)
    y = model[0](x)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = copy.deepcopy(plain)
    dispatch(model, {"0": "disk", "2": "cpu"}, main_device=torch.device("cpu"), store=FileStore(tmp_path, dict(model.state_dict())))
    results = []
    for each in (plain, model):
        x = torch.ones(2, 4, requires_grad=True)
        (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    assert torch.equal(*results)
