"""Compilation by regions: one code for blocks of one class, the same values, and the model as it was."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.testing import CompileCounter

from bigmodel import cpu_offload
from bigmodel.errors import TrainingError
from bigmodel.training.compiling import compile_model, compile_regions, has_compiled_regions, is_compiled_module
from bigmodel.training.configuration import TorchDynamoPlugin
from bigmodel.training.enums import DynamoBackend

DEPTH = 12
"""More blocks than the compiler makes versions of one function."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ends = nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.LayerNorm(8)})
        self.dropout = None
        self.also_norm = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ends["first"](self.norm(x))
        for block in self.blocks:
            x = block(x)
        return self.also_norm(self.ends["last"](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.body = Body()
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def test_blocks_of_one_class_share_what_was_compiled() -> None:
    model, tokens = Model(), torch.arange(6).view(2, 3)
    whole, blocks = CompileCounter(), CompileCounter()
    compiled = compile_regions(model, backend=blocks)
    torch.testing.assert_close(compiled(tokens), model(tokens))
    # embedding, the first end, the norm and the last end, the blocks, the head: not one for each block
    assert blocks.frame_count <= 6
    assert torch.compile(model, backend=whole)(tokens).shape == (2, 3, 10)
    assert blocks.op_count < whole.op_count / 2


def test_sharing_is_the_default_backends_too() -> None:
    model, tokens = Model(), torch.arange(6).view(2, 3)
    compiled = compile_regions(model, **TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER).to_kwargs())
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(compiled(tokens), model(tokens))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.heads = nn.ModuleDict({str(width): nn.Linear(8, width) for width in range(1, DEPTH + 1)})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return [head(x) for head in self.heads.values()]


@pytest.mark.skipif("isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="torch before 2.13")
def test_many_modules_beside_the_blocks_are_all_compiled() -> None:
    model, batch, counter = Heads(), torch.randn(2, 8), CompileCounter()
    compiled = compile_regions(model, backend=counter)
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch), model(batch))
        assert counter.frame_count == 1 + DEPTH
        compiled(batch)
        assert counter.frame_count == 1 + DEPTH


def test_the_model_stays_as_it_was_and_its_copy_remembers_it() -> None:
    model = Model()
    compiled = compile_regions(model, backend="eager")
    assert not has_compiled_regions(model)
    assert has_compiled_regions(compiled)
    assert type(compiled) is Model
    assert compiled._orig_mod is model
    assert compiled.body._orig_mod is model.body
    for mine, original in [(compiled.head, model.head), (compiled.body.blocks[3], model.body.blocks[3])]:
        assert isinstance(mine, OptimizedModule)
        assert mine._orig_mod is original
    assert compiled.body.norm is compiled.body.also_norm
    assert compiled.body.dropout is None
    assert len(compiled.body.blocks) == DEPTH
    assert set(compiled.body.ends) == {"first", "last"}
    assert is_compiled_module(compiled.body.ends["last"])
    assert [id(each) for each in compiled.parameters()] == [id(each) for each in model.parameters()]


def test_gradients_and_modes_are_those_of_the_model() -> None:
    model = Model()
    compiled = compile_regions(model, backend="aot_eager")
    compiled(torch.arange(6)).sum().backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(torch.arange(6)).sum().backward()
    torch.testing.assert_close(gradients, [each.grad for each in model.parameters()])
    compiled.eval()
    assert not model.body.blocks[0].training


def test_a_model_without_blocks_is_compiled_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = compile_regions(model, backend="eager")
    assert is_compiled_module(compiled)
    assert compiled._orig_mod is model


def test_methods_that_an_instance_has_of_its_own_run_on_the_copy() -> None:
    model = Model()
    model.forward = model.forward  # type: ignore[method-assign]
    assert compile_regions(model, backend="eager").forward.__self__ is not model
    counter = CompileCounter()
    compile_regions(model, backend=counter)(torch.arange(6))
    assert counter.frame_count > 0


def test_a_replaced_forward_that_no_copy_can_have_is_refused() -> None:
    model = Model()
    forward = model.forward
    model.forward = lambda tokens: forward(tokens).float()  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="Compile the model first"):
        compile_regions(model, backend="eager")


def test_a_dispatched_model_is_compiled_by_regions() -> None:
    plain, tokens = Model().eval(), torch.arange(6).view(2, 3)
    model = cpu_offload(copy.deepcopy(plain), execution_device="cpu")
    counter = CompileCounter()
    with torch.no_grad():
        compiled = compile_regions(model, backend=counter)
        torch.testing.assert_close(compiled(tokens), plain(tokens))
        first = counter.frame_count
        torch.testing.assert_close(compiled(tokens), plain(tokens))
    assert 0 < counter.frame_count == first < DEPTH


@pytest.mark.parametrize(
    ("arguments", "whole", "regions"),
    [({}, False, False), ({"backend": "eager"}, True, False), ({"backend": "eager", "use_regional_compilation": True}, False, True)],
)
def test_a_plugin_compiles_as_it_says(arguments: dict[str, Any], whole: bool, regions: bool) -> None:
    model, tokens = Model(), torch.arange(6)
    plugin = TorchDynamoPlugin(**arguments)
    compiled = compile_model(model, plugin)
    assert (is_compiled_module(compiled), has_compiled_regions(compiled) and not is_compiled_module(compiled)) == (whole, regions)
    assert compile_model(compiled, plugin) is compiled
    assert (compiled is model) == (not arguments)
    torch.testing.assert_close(compiled(tokens), model(tokens))


def test_a_model_with_a_part_that_was_compiled_is_compiled() -> None:
    model, tokens = Model(), torch.arange(6)
    model.head = torch.compile(model.head, backend="eager")
    compiled = compile_model(model, TorchDynamoPlugin(backend=DynamoBackend.EAGER))
    assert is_compiled_module(compiled)
    torch.testing.assert_close(compiled(tokens), model(tokens))
