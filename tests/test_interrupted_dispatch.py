"""Ctrl-C and errors at any moment of load → pack → dispatch: the model is what it was before, or complete."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel

PACKAGE = str(Path(bigmodel.__file__).parent)
X = torch.ones(1, 128)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(3))
        self.head = nn.Linear(128, 128)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def filled(value: float) -> Net:
    model = Net().requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(value / 128)
    return model


def empty() -> Net:
    with bigmodel.init_empty_weights():
        return Net()


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(filled(1.0).state_dict(), "one.safetensors")
    save_file(filled(2.0).state_dict(), "two.safetensors")


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions of the package `work` calls in this thread."""
    return _traced(work, -1)


def interrupted(work: Callable[[], Any], at: int) -> bool:
    """Whether Ctrl-C at the `at`th call of a function of the package came out of `work`."""
    try:
        _traced(work, at)
    except KeyboardInterrupt:
        return True
    return False


def _traced(work: Callable[[], Any], at: int) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # may be closed by the garbage collection, which takes no error
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and not is_generator:
            count += 1
            if count == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def what_it_is(model: nn.Module) -> dict[str, Any]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    modules = {name: (type(module), "_hf_hook" in module.__dict__) for name, module in model.named_modules()}
    return {name: (tensor, tensor.device, tensor.dtype) for name, tensor in tensors.items()} | modules


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        (each[0] is other[name][0] and each[1:] == other[name][1:]) if isinstance(each[0], torch.Tensor) else each == other[name]
        for name, each in one.items()
    )


@pytest.mark.parametrize("device_map", [{"": "cpu", "blocks.1": "disk"}, {"": "cpu"}, {"": "disk"}])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_an_empty_model_stays_empty(device_map: dict[str, Any], quantization: str | None) -> None:
    def load(model: Net) -> None:
        bigmodel.load_checkpoint_and_dispatch(model, "one.safetensors", device_map=device_map, quantization=quantization)

    load(empty())
    count = calls_of(lambda: load(empty()))
    states: dict[bool, int] = {True: 0, False: 0}
    for at in range(1, count, max(1, count // 60)):
        model = empty()
        before = what_it_is(model)
        if interrupted(lambda model=model: load(model), at):
            is_empty = is_same(before, what_it_is(model))
            states[is_empty] += 1
            if not is_empty:
                assert torch.allclose(model(X), filled(1.0)(X), atol=0.05), at
            load(model)
        assert torch.allclose(model(X), filled(1.0)(X), atol=0.05), at
    assert states[True] > 50
    assert states[False] <= 2  # complete already: there is little after that


def test_a_dispatched_model_keeps_its_weights() -> None:
    def load(model: Net, file: str, device_map: dict[str, Any]) -> None:
        bigmodel.load_checkpoint_and_dispatch(model, f"{file}.safetensors", device_map=device_map)

    def dispatched() -> Net:
        model = empty()
        load(model, "one", {"": "cpu", "blocks.1": "disk"})
        return model

    second = {"": "disk", "blocks.1": "cpu"}
    one, two = (filled(value)(X) for value in (1.0, 2.0))
    model = dispatched()
    count = calls_of(lambda: load(model, "two", second))
    old = 0
    for at in range(1, count, max(1, count // 60)):
        model = dispatched()
        if interrupted(lambda model=model: load(model, "two", second), at):
            out = model(X)
            old += torch.equal(out, one)
            assert torch.equal(out, one) or torch.equal(out, two), at
        load(model, "two", second)
        assert torch.equal(model(X), two), at
    assert old > 50
