"""Behaviour §4: `bigmodel.hooks`."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import pytest
import torch
from contract_models import ReadsItsChild, devices, ready
from model_for_test import ModelForTest
from torch import nn
from torch.fx import symbolic_trace

import bigmodel.hooks
from bigmodel import dispatch_model
from bigmodel.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class PlusOneBefore(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs


class TimesTwoAfter(ModelHook):
    def post_forward(self, module, output):
        return output * 2


class Recording(ModelHook):
    def __init__(self, name, events):
        self.name, self.events = name, events

    def init_hook(self, module):
        self.events.append(f"{self.name} init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.events.append(f"{self.name} pre")
        return args, kwargs

    def post_forward(self, module, output):
        self.events.append(f"{self.name} post")
        return output

    def detach_hook(self, module):
        self.events.append(f"{self.name} detach")
        return module


# --- adding and removing ---


def test_forward_keeps_its_name_and_signature():
    model, x, expected = ready()
    assert add_hook_to_module(model, ModelHook()) is model
    assert isinstance(model._hf_hook, ModelHook)
    assert hasattr(model, "_old_forward")
    assert model.forward.__name__ == "forward"
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert torch.equal(model(x), expected)
    assert remove_hook_from_module(model) is model
    assert not hasattr(model, "_hf_hook")
    assert not hasattr(model, "_old_forward")
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert torch.equal(model(x), expected)


def test_hooks_change_inputs_and_outputs():
    model, x, _ = ready()
    plus_one, double = model(x + 1), model(x) * 2
    add_hook_to_module(model, PlusOneBefore())
    assert torch.equal(model(x), plus_one)
    add_hook_to_module(model, PlusOneBefore())  # takes the other one's place
    assert torch.equal(model(x), plus_one)
    add_hook_to_module(model, TimesTwoAfter())
    assert torch.equal(model(x), double)


def test_appended_hooks_act_one_after_the_other():
    events = []
    module = nn.Linear(2, 2)
    for name in ("first", "second", "third"):
        add_hook_to_module(module, Recording(name, events), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    events.clear()
    module(torch.ones(1, 2))
    assert events == ["first pre", "second pre", "third pre", "first post", "second post", "third post"]
    events.clear()
    remove_hook_from_module(module)
    assert events == ["first detach", "second detach", "third detach"]


def test_appending_begins_the_earlier_hooks_anew():
    events = []
    module = nn.Linear(2, 2)
    for name in ("first", "second", "third"):
        add_hook_to_module(module, Recording(name, events), append=True)
    assert events == [
        "first init",
        *("first detach", "first init", "second init"),
        *("first detach", "second detach", "first init", "second init", "third init"),
    ]


def test_appending_leaves_weights_where_they_rest():
    module = nn.Linear(2, 2)
    x, expected = torch.ones(1, 2), module(torch.ones(1, 2))
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True))
    resting, events = module.weight, []
    add_hook_to_module(module, Recording("second", events), append=True)
    assert module.weight is resting
    assert events == ["second init"]
    assert torch.equal(module(x), expected)


def test_a_replaced_hook_is_not_detached():
    events = []
    module = nn.Linear(2, 2)
    add_hook_to_module(module, Recording("first", events))
    old = module._old_forward
    add_hook_to_module(module, Recording("second", events))
    assert module._old_forward == old
    assert events == ["first init", "second init"]


def test_a_sequence_as_it_is_given():
    model, x, _ = ready()
    expected = model(x + 2)
    hook = SequentialHook(PlusOneBefore(), PlusOneBefore())
    assert len(hook.hooks) == 2
    add_hook_to_module(model, hook)
    torch.testing.assert_close(model(x), expected)


def test_the_hook_is_looked_up_at_each_call():
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = module(x)
    add_hook_to_module(module, PlusOneBefore())
    module._hf_hook = TimesTwoAfter()
    assert torch.equal(module(x), expected * 2)


def test_no_grad_is_asked_at_each_call():
    module = nn.Linear(2, 2)
    hook = ModelHook()
    add_hook_to_module(module, hook)
    assert ModelHook.no_grad is False
    assert module(torch.ones(1, 2)).requires_grad
    hook.no_grad = True
    assert not module(torch.ones(1, 2)).requires_grad


def test_removal_from_everything_below():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model[1], recurse=False)
    assert hasattr(model[1][0], "_hf_hook")
    remove_hook_from_module(model[1], recurse=True)
    assert not hasattr(model[1][0], "_hf_hook")
    assert hasattr(model, "_hf_hook")
    assert remove_hook_from_submodules(model) is None
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.mark.parametrize("method", ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron"])
def test_removal_takes_moving_methods_off_the_instance(method):
    module = nn.Linear(2, 2)
    add_hook_to_module(module, ModelHook())
    module.__dict__[method] = lambda *args: None
    remove_hook_from_module(module)
    assert method not in module.__dict__


def test_traced_modules_can_still_be_changed_after_a_hook():
    model, x, expected = ready()
    traced = symbolic_trace(model)
    add_hook_to_module(traced, ModelHook())
    assert torch.equal(traced(x), expected)
    remove_hook_from_module(traced, recurse=True)
    last = next(node for node in traced.graph.nodes if node.name == "linear2")
    with traced.graph.inserting_after(last):
        added = traced.graph.call_function(torch.sigmoid, (last,))
    next(node for node in traced.graph.nodes if node.op == "output").replace_input_with(last, added)
    traced.recompile()
    assert torch.equal(traced(x), torch.sigmoid(expected))


def test_the_hook_on_a_resized_module_can_be_put_on_the_new_one():
    """What transformers does when embeddings are resized."""
    model, _, _ = ready()
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    hook = model._hf_hook
    new = nn.Linear(4, 6)
    if hasattr(model.linear2, "_hf_hook"):
        add_hook_to_module(new, model.linear2._hf_hook)
    add_hook_to_module(new, hook, append=True)
    assert new(torch.ones(1, 4)).shape == (1, 6)


# --- every hook can be built anew from its attributes ---


def all_hooks():
    user = UserCpuOffloadHook(nn.Linear(1, 1), CpuOffload())
    return [
        AlignDevicesHook(execution_device="cpu", offload=True, io_same_device=True, skip_keys=["past"], offload_buffers=True),
        CpuOffload(execution_device="cpu", prev_module_hook=user),
        LayerwiseCastingHook(torch.float16, torch.float32, False),
        user,
    ]


@pytest.mark.parametrize("hook", all_hooks(), ids=lambda hook: type(hook).__name__)
def test_constructor_arguments_are_kept_under_their_own_names(hook):
    parameters = inspect.signature(type(hook).__init__).parameters
    assert set(parameters) - {"self"} <= set(vars(hook))
    again = type(hook)(**{name: value for name, value in vars(hook).items() if name in parameters})
    for name in set(parameters) - {"self"}:
        assert getattr(again, name) is getattr(hook, name)


def test_the_hooks_of_a_dispatch_can_be_built_anew_by_the_name_of_their_class(tmp_path):
    """As transformers does it for a dequantized layer: class by name, those attributes that its constructor takes."""
    model, x, expected = ready()
    dispatch_model(
        model, {"linear1": "disk", "batchnorm": "cpu", "linear2": "cpu"}, offload_dir=tmp_path, skip_keys="past", force_hooks=True
    )
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    assert hooked
    for module in hooked:
        old = module._hf_hook
        kind = getattr(bigmodel.hooks, type(old).__name__)
        parameters = inspect.signature(kind.__init__).parameters
        new = kind(**{name: value for name, value in vars(old).items() if name in parameters})
        assert isinstance(new, AlignDevicesHook)
        for name in ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys"):
            assert getattr(new, name) == getattr(old, name), name
    assert torch.allclose(model(x), expected)


# --- AlignDevicesHook ---


def test_repr_and_attributes():
    hook = AlignDevicesHook(execution_device=torch.device("cpu"), offload=True)
    assert repr(hook) == (
        "AlignDevicesHook(execution_device=cpu, offload=True, io_same_device=False, offload_buffers=False, place_submodules=False, "
        "skip_keys=None)"
    )
    assert hook.input_device is None
    assert hook.param_original_devices == {}
    assert hook.buffer_original_devices == {}
    assert hook.tied_params_names == set()


@pytest.mark.parametrize("place_submodules", [False, True])
def test_placing(accelerators, place_submodules):
    (device,) = accelerators(1)
    module = nn.Sequential(nn.BatchNorm1d(3))
    module.register_parameter("own", nn.Parameter(torch.ones(1)))
    add_hook_to_module(module, AlignDevicesHook(execution_device=device, place_submodules=place_submodules))
    assert module.own.device == device
    assert {tensor.device for tensor in module[0].state_dict().values()} == {device if place_submodules else torch.device("cpu")}


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloading_by_hooks_on_each_module(execution_device, offload_buffers):
    model, x, expected = ready()
    for module in (model.linear1, model.batchnorm, model.linear2):
        add_hook_to_module(module, AlignDevicesHook(execution_device=execution_device, offload=True, offload_buffers=offload_buffers))
    for name, where in devices(model).items():
        is_buffer = name.startswith(("batchnorm.running", "batchnorm.num"))
        assert where == (execution_device.type if is_buffer and not offload_buffers else "meta"), name
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)
    assert model.linear1._hf_hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    assert model.linear1.weight.device.type == "meta"
    remove_hook_from_submodules(model)
    assert {where for name, where in devices(model).items() if "running" not in name and "num" not in name} == {"cpu"}
    assert torch.equal(model.to("cpu")(x), expected)


def test_own_weights_map(execution_device):
    module = nn.Linear(2, 2)
    values = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    add_hook_to_module(module, AlignDevicesHook(execution_device=execution_device, offload=True, weights_map=values))
    assert module._hf_hook.weights_map is values
    with torch.no_grad():
        assert torch.equal(module(torch.ones(1, 2)).cpu(), torch.full((1, 2), 2.0))


def test_inputs_are_moved_and_outputs_go_back(accelerators):
    (device,) = accelerators(1)
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook(execution_device=device))
    x = torch.ones(1, 2)
    with torch.no_grad():
        assert module(x).device == device
        module._hf_hook.io_same_device = True
        assert module(x).device.type == "cpu"
        assert module(x.to(device)).device == device
        assert module(input=x).device.type == "cpu"


def test_no_execution_device_leaves_tensors_where_they_are(accelerators):
    accelerators(1)
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook(io_same_device=True))
    with torch.no_grad():
        assert module(torch.ones(1, 2)).device.type == "cpu"


def test_skipped_keys_at_any_depth(accelerators):
    (device,) = accelerators(1)

    class Passes(nn.Module):
        def forward(self, x, **kwargs):
            return kwargs

    for keys in ("cache", ["cache"], ("cache",)):
        module = Passes()
        add_hook_to_module(module, AlignDevicesHook(execution_device=device, skip_keys=keys))
        result = module(torch.ones(1), cache=torch.ones(1), other={"cache": torch.ones(1), "moved": torch.ones(1)})
        assert result["cache"].device.type == "cpu"
        assert result["other"]["cache"].device.type == "cpu"
        assert result["other"]["moved"].device == device


def test_hooks_run_by_hand_without_arguments(execution_device):
    """What `force_accelerate_hooks` of transformers does around modules that read their children's weights."""
    module = nn.Linear(2, 2)
    weight = module.weight.detach().clone()
    add_hook_to_module(module, AlignDevicesHook(execution_device=execution_device, offload=True))
    args, kwargs = module._hf_hook.pre_forward(module)
    assert (args, kwargs) == ((), {})
    assert module.weight.device == execution_device
    assert torch.equal(module.weight.detach().cpu(), weight)
    assert module._hf_hook.post_forward(module, ()) == ()
    assert module.weight.device.type == "meta"


# --- attaching ---


def test_execution_hooks_on_modules_that_hold_tensors(accelerators):
    (device,) = accelerators(1)
    model = nn.Sequential(OrderedDict(inner=nn.Sequential(nn.Linear(2, 2), nn.ReLU()), outer=nn.Linear(2, 2)))
    add_hook_to_module(model.outer, ModelHook())
    attach_execution_device_hook(model, device)
    assert isinstance(model.inner[0]._hf_hook, AlignDevicesHook)
    assert not hasattr(model.inner[1], "_hf_hook")
    assert type(model.outer._hf_hook) is ModelHook
    model = nn.Sequential(ReadsItsChild())
    attach_execution_device_hook(model, "cpu", preload_module_classes=["ReadsItsChild"])
    assert hasattr(model[0], "_hf_hook")
    assert not hasattr(model[0].linear, "_hf_hook")


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_attach_with_offload(execution_device, offload_buffers):
    model, x, expected = ready()
    attach_align_device_hook(model, execution_device=execution_device, offload=True, offload_buffers=offload_buffers)
    assert not hasattr(model, "_hf_hook")
    assert model.linear1._hf_hook.offload is True
    assert devices(model)["batchnorm.running_mean"] == ("meta" if offload_buffers else execution_device.type)
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model.to("cpu")(x), expected)


def test_attach_with_a_weights_map(execution_device):
    model, x, expected = ready()
    values = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, execution_device, True, values, True, "model")
    assert set(devices(model).values()) == {"meta"}
    assert torch.equal(model.linear1._hf_hook.weights_map["weight"], values["model.linear1.weight"])
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)


def test_attach_without_offload_places(execution_device):
    model, x, expected = ready()
    attach_align_device_hook(model, execution_device=execution_device)
    assert {tensor.device for tensor in model.state_dict().values()} == {execution_device}
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)


def test_attach_at_preloaded_classes(execution_device):
    model = nn.Sequential(nn.Linear(3, 3), ReadsItsChild())
    x = torch.randn(2, 3)
    expected = model(x)
    attach_align_device_hook(model, execution_device=execution_device, offload=True, preload_module_classes=["ReadsItsChild"])
    assert model[1]._hf_hook.place_submodules is True
    assert not hasattr(model[1].linear, "_hf_hook")
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)


def test_blocks_on_their_devices(accelerators):
    first, second = accelerators(2)
    model, x, expected = ready()
    attach_align_device_hook_on_blocks(model, execution_device={"linear1": 0, "batchnorm": "sim:1", "linear2": first}, offload=False)
    assert model.linear1.weight.device == first
    assert model.batchnorm.running_mean.device == second
    with torch.no_grad():
        output = model(x)
    assert output.device.type == "cpu"
    assert torch.equal(output, expected)
    hooks = [model._hf_hook, *getattr(model._hf_hook, "hooks", [])]
    assert any(getattr(hook, "io_same_device", False) for hook in hooks)


def test_blocks_of_which_some_are_offloaded(accelerators):
    (device,) = accelerators(1)
    model, x, expected = ready()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"linear1": device, "batchnorm": device, "linear2": device},
        offload={"linear1": True, "batchnorm": False, "linear2": True},
        weights_map=values,
    )
    assert model.linear1.weight.device.type == "meta"
    assert model.batchnorm.weight.device == device
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("offload", [False, True])
def test_one_device_for_the_whole_model(execution_device, offload):
    model, x, expected = ready()
    attach_align_device_hook_on_blocks(model, execution_device=execution_device, offload=offload)
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), expected)
    if not offload:
        assert model._hf_hook.io_same_device is True
        assert model._hf_hook.place_submodules is True


def test_one_device_with_blocks_of_their_own_offload(execution_device):
    model, x, expected = ready()
    attach_align_device_hook_on_blocks(
        model, execution_device=execution_device, offload={"linear1": True, "batchnorm": True, "linear2": False}
    )
    assert model.linear1.weight.device.type == "meta"
    assert model.linear2.weight.device == execution_device
    with torch.no_grad():
        assert torch.equal(model(x), expected)


# --- whole models ---


def test_cpu_offload_hook(accelerators):
    (device,) = accelerators(1)
    model = ModelForTest().to(device).eval()
    add_hook_to_module(model, CpuOffload(execution_device=device))
    assert set(devices(model).values()) == {"cpu"}
    with torch.no_grad():
        assert model(torch.ones(2, 3)).device == device
    assert {tensor.device for tensor in model.state_dict().values()} == {device}
    assert CpuOffload().execution_device == device
    user = UserCpuOffloadHook(model, model._hf_hook)
    user.offload()
    assert set(devices(model).values()) == {"cpu"}
    user.remove()
    assert not hasattr(model, "_hf_hook")
    assert model(torch.ones(2, 3)).device.type == "cpu"


def test_cpu_offload_hook_without_an_accelerator():
    assert torch.device(CpuOffload().execution_device).type == "cpu"


def test_layerwise_hook_by_itself():
    module = nn.Linear(2, 2)
    add_hook_to_module(module, LayerwiseCastingHook(torch.float16, torch.float32, non_blocking=False))
    assert module.weight.dtype == torch.float16
    assert module(torch.ones(1, 2)).dtype == torch.float32
    assert module.weight.dtype == torch.float16
