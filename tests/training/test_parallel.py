"""Models out of their wrappers, and module trees from the bottom up."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import Processes
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DataParallel, DistributedDataParallel

from bigmodel.training.compiling import compile_regions, is_compiled_module
from bigmodel.training.nested import convert_outputs_to_fp32
from bigmodel.training.parallel import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    merge_dicts,
    recursive_getattr,
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Residual(nn.Module):
    """No wrapper, although what it holds is called `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.module(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model: nn.Module, backend: Any = "eager") -> Any:
    return torch.compile(model, backend=backend)


def test_a_plain_model_is_itself() -> None:
    for model in (Model(), Residual(nn.Linear(4, 4))):
        assert extract_model_from_parallel(model) is model
        assert extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False, recursive=True) is model
    assert isinstance(model.module, nn.Linear)


@pytest.mark.parametrize("wrap", [DataParallel, lambda model: DataParallel(DataParallel(model))])
def test_wrappers_are_taken_away(wrap: Any) -> None:
    model = Model()
    assert extract_model_from_parallel(wrap(model)) is model


def test_engines_are_known_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = Model()
    engine = Engine(model)
    assert extract_model_from_parallel(engine) is engine
    library: Any = types.ModuleType("deepspeed")
    library.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    assert extract_model_from_parallel(engine) is model
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))  # one that has only begun to be imported
    assert extract_model_from_parallel(engine) is engine


def test_what_was_compiled_stays_compiled_and_what_trains_keeps_its_wrapper() -> None:
    model, batch, counter = Model(), torch.randn(2, 4), CompileCounter()
    wrapped = DataParallel(model)
    trained = compiled(wrapped, counter)
    extracted = extract_model_from_parallel(trained)
    assert is_compiled_module(extracted)
    assert extracted._orig_mod is model
    assert trained._orig_mod is wrapped
    torch.testing.assert_close(extracted(batch), model(batch))
    assert counter.frame_count == 1
    assert extract_model_from_parallel(trained, keep_torch_compile=False) is model


@pytest.mark.parametrize("keep", [True, False])
def test_compiled_models_are_found_within_wrappers(keep: bool) -> None:
    model = Model()
    inner = compiled(model)
    assert extract_model_from_parallel(inner, keep_torch_compile=keep) is (inner if keep else model)
    assert extract_model_from_parallel(DataParallel(inner), keep_torch_compile=keep) is (inner if keep else model)


@pytest.mark.parametrize("keep", [True, False])
def test_parts_that_were_compiled_by_themselves_stay_so(keep: bool) -> None:
    model = Model()
    model.layers[0] = compiled(model.layers[0])
    assert extract_model_from_parallel(DataParallel(model), keep_torch_compile=keep) is model
    assert is_compiled_module(model.layers[0])


def test_a_model_compiled_by_regions_is_found_on_both_sides() -> None:
    model = Model()
    regions = compile_regions(DataParallel(model), backend="eager")
    kept = extract_model_from_parallel(regions)
    assert type(kept) is Model
    assert kept._orig_mod is model
    assert all(map(is_compiled_module, kept.layers))
    assert extract_model_from_parallel(regions, keep_torch_compile=False) is model
    assert extract_model_from_parallel(compile_regions(model, backend="eager"), keep_torch_compile=False) is model


@pytest.mark.parametrize("keep", [True, False])
def test_wrappers_below_the_model_go_where_asked_for(keep: bool) -> None:
    model = Model()
    first, second, third = model.layers
    model.layers[0] = DataParallel(first)
    model.layers[1] = compiled(DataParallel(second))
    third.module = DataParallel(third.module)
    model.also = model.layers[0]
    assert extract_model_from_parallel(model) is model
    assert isinstance(model.layers[0], DataParallel)
    assert extract_model_from_parallel(DataParallel(model), keep_torch_compile=keep, recursive=True) is model
    assert model.layers[0] is first is model.also
    assert (model.layers[1]._orig_mod if keep else model.layers[1]) is second
    assert type(third.module) is nn.Linear


def test_the_forward_of_before_comes_back() -> None:
    model, batch = Model(), torch.randn(2, 4)
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    assert extract_model_from_parallel(DataParallel(model)) is model
    rounded = model(batch)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(model)
    assert extract_model_from_parallel(DataParallel(model), keep_fp32_wrapper=False) is model
    assert not torch.equal(model(batch), rounded)
    assert "forward" not in model.__dict__
    assert "_original_forward" not in model.__dict__
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(batch), model(batch))


def test_a_forward_of_the_instances_own_comes_back() -> None:
    model = Model()
    own = functools.partial(Model.forward, model)
    model._original_forward = own
    model.forward = convert_outputs_to_fp32(own)
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False).forward is own


def extracted_in_ranks() -> dict[str, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = Model()
    distributed = DistributedDataParallel(model)
    sharded = Model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    flat = Model()
    found = {
        "ddp": extract_model_from_parallel(distributed) is model,
        "fsdp2": extract_model_from_parallel(sharded) is sharded,
    }
    found["fsdp1"] = extract_model_from_parallel(FullyShardedDataParallel(flat, device_id=torch.device("cpu"))) is flat
    return found


def gradients_by_regions() -> bool:
    """Whether gradients of a `DistributedDataParallel` that is compiled by regions are those of both ranks' batches together."""
    torch.manual_seed(0)
    model, batches = Model(), torch.randn(2, 3, 4)
    model(batches.flatten(0, 1)).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    spread = compile_regions(DistributedDataParallel(model), backend="eager")
    spread(batches[torch.distributed.get_rank()]).square().mean().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    return extract_model_from_parallel(spread, keep_torch_compile=False) is model


@pytest.mark.xdist_group("processes")
def test_gradients_meet_where_what_spreads_the_model_is_compiled_by_regions(processes: Any) -> None:
    pool: Processes = processes(2)
    assert pool.run(gradients_by_regions) == [True, True]


@pytest.mark.xdist_group("processes")
def test_models_come_out_of_what_spreads_them(processes: Any) -> None:
    pool: Processes = processes(2)
    assert pool.run(extracted_in_ranks) == [{"ddp": True, "fsdp2": True, "fsdp1": True}] * 2


def test_children_come_before_their_parents() -> None:
    model = Model()
    model.head = nn.Sequential(nn.ReLU(), model.layers[0])
    names = ["layers.0.module", "layers.0", "layers.1.module", "layers.1", "layers.2.module", "layers.2", "layers", "head.0", "head", ""]
    pairs = get_module_children_bottom_up(model, return_fqns=True)
    assert pairs == [(name, model.get_submodule(name)) for name in names]
    assert get_module_children_bottom_up(model) == [module for _, module in pairs]


def test_dicts_are_merged_into_the_one_that_is_there() -> None:
    inner = {"size": 1}
    destination: dict[str, Any] = {"kept": 0, "deep": {"kept": inner, "changed": 1}, "plain": 3}
    source = {"deep": {"changed": 2, "new": {"x": 1}}, "plain": {"y": 2}, "added": 5}
    assert merge_dicts(source, destination) is destination
    assert destination == {"kept": 0, "deep": {"kept": {"size": 1}, "changed": 2, "new": {"x": 1}}, "plain": {"y": 2}, "added": 5}
    assert destination["deep"]["kept"] is inner
    destination["plain"]["y"] = 3
    assert source["plain"] == {"y": 2}


def test_attributes_are_followed_along_their_path() -> None:
    model = Model()
    assert recursive_getattr(model, "layers.1.module.weight") is model.layers[1].module.weight
    assert recursive_getattr(model, "layers") is model.layers
    with pytest.raises(AttributeError):
        recursive_getattr(model, "layers.1.weight")
