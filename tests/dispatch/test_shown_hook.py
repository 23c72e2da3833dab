"""Modules inside a block show a hook to scripts that ask them for one, without taking part in the forward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.dispatch import (
    AlignDevicesHook,
    LazyTensor,
    ModelHook,
    add_hook_to_module,
    dispatch,
    dispatched,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
    undispatch,
)
from bigmodel.dispatch.stores import MemoryStore
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")
MAP = {"": "cpu", "blocks": "disk"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def case() -> tuple[Net, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A dispatched model, its values, an input and what comes of it."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 4)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(x).detach()
    dispatch(model, MAP, main_device=CPU, store=MemoryStore(values))
    return model, values, x, expected


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def test_the_hook_of_a_leaf_tells_of_its_own_weights(case: Any) -> None:
    model, values, x, expected = case
    assert not any(hasattr(block.up, "_hf_hook") for block in model.blocks)
    found = {}
    for name, module in model.named_modules():
        if not list(module.children()) and has_offloaded_params(module):
            hook = module._hf_hook
            assert isinstance(hook, AlignDevicesHook)
            assert (hook.offload, hook.execution_device, hook.io_same_device, hook.offload_buffers) == (True, CPU, False, False)
            assert repr(hook).startswith("AlignDevicesHook(execution_device=cpu, offload=True")
            found |= {f"{name}.{key}": hook.weights_map[key] for key in hook.weights_map}
    assert found.keys() == {name for name in values if name.startswith("blocks.")}
    assert all(torch.equal(value, values[name]) for name, value in found.items())
    before = model.blocks[0].up.forward
    assert torch.equal(run(model, x), expected)
    assert model.blocks[0].up.forward == before
    assert not has_offloaded_params(model.head)
    assert not hasattr(model.head, "_hf_hook")


def test_real_weights_between_pre_and_post_forward(case: Any) -> None:
    model, values, x, expected = case
    leaf = model.blocks[1].up
    assert has_offloaded_params(leaf)
    leaf._hf_hook.execution_device = "cpu"
    args, _ = leaf._hf_hook.pre_forward(leaf, x)
    assert args[0] is x
    assert type(leaf.weight) is nn.Parameter
    assert not has_offloaded_params(leaf)
    assert torch.equal(leaf.weight, values["blocks.1.up.weight"])
    with torch.no_grad():
        leaf.weight.mul_(2)
    assert leaf._hf_hook.post_forward(leaf, ()) == ()
    assert isinstance(leaf.weight, LazyTensor)
    assert torch.equal(leaf._hf_hook.weights_map["weight"], 2 * values["blocks.1.up.weight"])
    assert not torch.equal(run(model, x), expected)
    with pytest.raises(DispatchError, match="without a pre_forward"):
        leaf._hf_hook.post_forward(leaf, ())


def test_it_is_gone_with_the_dispatch(case: Any) -> None:
    model, values, x, expected = case
    for _ in range(2):
        assert all(has_offloaded_params(block.down) for block in model.blocks)
        undispatch(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
        assert not has_offloaded_params(model.blocks[0].down)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
        dispatch(model, MAP, main_device=CPU, store=MemoryStore(values))
    assert has_offloaded_params(model.blocks[0].down)
    dispatch(model, {"": "cpu", "blocks.1": "disk"}, main_device=CPU, store=MemoryStore(values))
    assert [has_offloaded_params(block.down) for block in model.blocks] == [False, True, False]
    assert [hasattr(block.down, "_hf_hook") for block in model.blocks] == [False, True, False]
    assert torch.equal(run(model, x), expected)


@pytest.mark.parametrize("recurse", [False, True])
def test_removing_hooks(case: Any, recurse: bool) -> None:
    model, _, x, expected = case
    leaf = model.blocks[0].up
    assert has_offloaded_params(leaf)
    remove_hook_from_module(leaf)
    assert not hasattr(leaf, "_hf_hook")
    assert torch.equal(run(model, x), expected)
    assert has_offloaded_params(leaf)
    if recurse:
        remove_hook_from_submodules(model)
    else:
        for module in (*model.blocks, model):
            remove_hook_from_module(module)
    assert dispatched(model) is None
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert not isinstance(leaf.weight, LazyTensor)
    assert torch.equal(run(model, x), expected)


def test_copies_show_their_own_weights(case: Any) -> None:
    model, values, x, expected = case
    assert has_offloaded_params(model.blocks[0].up)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].up.weight.zero_()
    assert has_offloaded_params(twin.blocks[0].up)
    assert not twin.blocks[0].up._hf_hook.weights_map["weight"].any()
    assert torch.equal(model.blocks[0].up._hf_hook.weights_map["weight"], values["blocks.0.up.weight"])
    assert torch.equal(run(model, x), expected)
    with pytest.raises(DispatchError, match="cannot be pickled"):
        pickle.dumps(model)


class Counting(ModelHook):
    calls = 0

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls += 1
        return output


@pytest.mark.parametrize("append", [False, True])
def test_a_hook_that_is_added_takes_its_place(case: Any, append: bool) -> None:
    model, _, x, expected = case
    leaf, hook = model.blocks[0].up, Counting()
    assert has_offloaded_params(leaf)
    add_hook_to_module(leaf, hook, append=append)
    assert leaf._hf_hook is hook
    assert torch.equal(run(model, x), expected)
    assert hook.calls == 1


def test_it_may_be_taken_off_and_added(case: Any) -> None:
    model, values, x, expected = case
    leaf = model.blocks[0].up
    assert has_offloaded_params(leaf)
    hook = leaf._hf_hook
    remove_hook_from_module(leaf)
    add_hook_to_module(leaf, hook)
    assert torch.equal(run(model, x), expected)
    assert torch.equal(run(leaf, x), nn.functional.linear(x, values["blocks.0.up.weight"], values["blocks.0.up.bias"]))
    assert isinstance(leaf.weight, LazyTensor)
    undispatch(model)
    assert torch.equal(run(model, x), expected)
