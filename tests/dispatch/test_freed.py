"""The last reference to a dispatched model frees it, with the cycle collector turned off."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import types
import weakref

import pytest
import torch
from dispatch_models import FileStore, tiny
from model_for_test import ModelForTest
from torch import nn

import bigmodel
from bigmodel.dispatch import ModelHook, add_hook_to_module, attach_align_device_hook, dispatch, remove_hook_from_module, undispatch
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def kept_by(make) -> list[str]:
    """Names of the modules that are alive after their model was let go of."""
    model = make()
    alive = {name: weakref.ref(module) for name, module in model.named_modules()}
    storages = [weakref.ref(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    del model
    return [name for name, reference in alive.items() if reference() is not None] + [
        "a tensor" for reference in storages if reference() is not None
    ]


def allocated_bytes(device: torch.device) -> int:
    """What is allocated on an accelerator once the threads that read for a gone model have ended and its streams have done their work.

    An allocator keeps what a stream still uses.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("bigmodel-reader"):
            thread.join(timeout=5)
    if device.type == "cpu":
        return 0
    torch.accelerator.synchronize(device)
    return torch.accelerator.memory_allocated(device)


def on_disk(tmp_path, device, **arguments):
    model, ids, _ = tiny(width=64)
    store = FileStore(tmp_path, model.state_dict())
    dispatch(model, {"": "disk"}, main_device=device, store=store, no_split_module_classes="Block", **arguments)
    with torch.no_grad():
        model(ids)
        model(ids)
    return model


@pytest.mark.parametrize("prefetch", [False, True])
def test_dispatched(tmp_path, execution_device, no_collector, prefetch):
    assert kept_by(lambda: on_disk(tmp_path, execution_device, prefetch=prefetch)) == []
    assert allocated_bytes(execution_device) == 0


def test_after_training_threads_copies_and_failures(tmp_path, execution_device, no_collector):
    def make():
        model = on_disk(tmp_path, execution_device)
        copied = copy.deepcopy(model)
        ids = torch.zeros(1, 3, dtype=torch.long)
        embedding = torch.randn(1, 3, 64, requires_grad=True)
        copied.layers[0](embedding.to(execution_device)).sum().backward()
        copied.layers[1].register_forward_hook(_fails)
        with pytest.raises(ZeroDivisionError):
            copied(ids)
        bigmodel.placement(copied)
        with bigmodel.timeline(model):
            model(ids)
        return copied

    assert kept_by(make) == []
    assert allocated_bytes(execution_device) == 0


def _fails(*_):
    return 1 / 0


def test_spread_over_devices(accelerators, no_collector):
    accelerators(2)

    def make():
        model, ids, expected = tiny()
        device_map = {"": 0, "layers.1": 1, "layers.2": "cpu", "layers.3": "cpu:resident"}
        bigmodel.dispatch_model(model, device_map)
        with torch.no_grad():
            assert torch.equal(model(ids).cpu(), expected)
        return model

    assert kept_by(make) == []
    assert [allocated_bytes(torch.device("sim", index)) for index in range(2)] == [0, 0]


def test_undispatched(tmp_path, no_collector):
    assert kept_by(lambda: undispatch(on_disk(tmp_path, CPU))) == []


def test_transformers(tmp_path, no_collector):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)

    def make():
        model = bigmodel.from_pretrained(tmp_path, device_map={"": "disk"})
        model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=3, do_sample=False)
        return model

    make()  # what libraries make once
    gc.collect()
    assert kept_by(make) == []


def test_hooks_alone(no_collector):
    def make():
        model = ModelForTest()
        attach_align_device_hook(model, CPU, offload=True)
        add_hook_to_module(model, ModelHook(), append=True)
        model(torch.zeros(2, 3))
        return model

    assert kept_by(make) == []


def test_methods_of_a_model_that_nobody_else_holds(tmp_path, no_collector):
    moved = bigmodel.cpu_offload(ModelForTest(), CPU).to(torch.float64)
    assert moved.linear1.weight.dtype == torch.float64
    with pytest.raises(DispatchError, match="can't move"):
        bigmodel.cpu_offload(ModelForTest(), CPU).to("meta")


def test_a_forward_without_its_model_says_so():
    model = add_hook_to_module(ModelForTest(), ModelHook())
    forward, own = model.forward, model._old_forward
    del model
    for function in (forward, own):
        with pytest.raises(DispatchError, match="is gone"):
            function(torch.zeros(2, 3))


def test_forwards_answer_as_methods_do():
    model = add_hook_to_module(ModelForTest().eval(), ModelHook())
    plain = ModelForTest.forward
    for function in (model.forward, model._old_forward):
        assert list(inspect.signature(function).parameters) == ["x"]
        assert function.__name__ == "forward"
        assert function.__qualname__ == plain.__qualname__
        assert function.__module__ == plain.__module__
    assert model._old_forward.__self__ is model
    assert model._old_forward.__func__ is plain
    x = torch.randn(2, 3)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied._old_forward.__self__ is copied
        with torch.no_grad():
            copied.linear2.weight.zero_()
        assert not torch.equal(copied(x), model(x))
        assert torch.equal(copied(x), copied._old_forward(x))


def test_a_method_put_on_an_instance_comes_back():
    model = ModelForTest()

    def other(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + len(list(self.children()))

    model.forward = types.MethodType(other, model)
    add_hook_to_module(model, ModelHook())
    assert torch.equal(model(torch.zeros(1)), torch.full((1,), 3.0))
    remove_hook_from_module(model)
    assert isinstance(model.forward, types.MethodType)
    assert model.forward.__func__ is other
