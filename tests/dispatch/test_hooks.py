"""The hook classes and the functions around them, as scripts and libraries use them."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dispatch_models import TinyModel, tiny
from model_for_test import ModelForTest
from torch import nn

from bigmodel.dispatch import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    LazyTensor,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
    dispatch,
    get_parameter,
    has_offloaded_params,
    placement,
    remove_hook_from_module,
    remove_hook_from_submodules,
    update_parameter,
)
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")


class AddOne(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), kwargs


class TimesTwo(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


def test_adding_and_removing(execution_device):
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x + 1)
    hook = AddOne()
    assert add_hook_to_module(model, hook) is model
    assert model._hf_hook is hook
    assert model.forward.__name__ == "forward"
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert torch.equal(model(x), expected)
    add_hook_to_module(model, TimesTwo())  # replaces
    assert torch.equal(model(x + 1), expected * 2)
    assert remove_hook_from_module(model) is model
    assert not hasattr(model, "_hf_hook")
    assert not hasattr(model, "_old_forward")
    assert torch.equal(model(x + 1), expected)


def test_append_makes_a_sequence():
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x + 1 + 1)
    add_hook_to_module(model, AddOne())
    add_hook_to_module(model, AddOne(), append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert len(model._hf_hook.hooks) == 2
    assert torch.equal(model(x), expected)
    add_hook_to_module(model, SequentialHook(TimesTwo(), TimesTwo()), append=True)
    assert torch.equal(model(x), expected * 4)
    remove_hook_from_module(model)
    assert torch.equal(model(x + 1 + 1), expected)


def test_no_grad_is_read_at_each_call():
    model = ModelForTest()
    hook = ModelHook()
    add_hook_to_module(model, hook)
    x = torch.randn(2, 3)
    assert model(x).requires_grad
    hook.no_grad = True
    assert not model(x).requires_grad


def test_graph_modules_keep_recompiling():
    module = torch.fx.symbolic_trace(ModelForTest().eval())
    x = torch.randn(2, 3)
    expected = module(x + 1)
    add_hook_to_module(module, AddOne())
    assert torch.equal(module(x), expected)
    remove_hook_from_module(module)
    module.recompile()
    assert torch.equal(module(x + 1), expected)


def test_align_hook_keeps_its_arguments():
    arguments = {
        "execution_device": CPU,
        "offload": True,
        "io_same_device": False,
        "weights_map": {},
        "offload_buffers": True,
        "place_submodules": True,
        "skip_keys": "cache",
        "tied_params_map": {},
    }
    assert list(inspect.signature(AlignDevicesHook.__init__).parameters)[1:] == list(arguments)
    hook = AlignDevicesHook(**arguments)
    assert all(hook.__dict__[name] is value or hook.__dict__[name] == value for name, value in arguments.items())
    assert repr(AlignDevicesHook(CPU, offload=True)) == (
        "AlignDevicesHook(execution_device=cpu, offload=True, io_same_device=False, "
        "offload_buffers=False, place_submodules=False, skip_keys=None)"
    )


def test_align_hook_offloads_and_comes_back(execution_device):
    torch.manual_seed(0)
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    for part in (model.linear1, model.batchnorm, model.linear2):
        add_hook_to_module(part, AlignDevicesHook(execution_device=execution_device, offload=True))
    assert model.linear1.weight.device.type == "meta"
    assert model.batchnorm.running_mean.device == execution_device
    assert has_offloaded_params(model.linear1)
    assert not has_offloaded_params(model)
    assert torch.equal(model(x).cpu(), expected)
    assert model.linear1.weight.device.type == "meta"
    remove_hook_from_submodules(model)
    assert model.linear1.weight.device == CPU
    assert type(model.linear1.weight) is nn.Parameter
    model.to("cpu")
    assert torch.equal(model(x), expected)


def test_align_hook_with_buffers_and_a_map(execution_device):
    torch.manual_seed(0)
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_hook_to_module(
        model,
        AlignDevicesHook(
            execution_device, offload=True, weights_map=weights, offload_buffers=True, place_submodules=True, io_same_device=True
        ),
    )
    assert all(tensor.device.type == "meta" for tensor in model.state_dict().values())
    assert torch.equal(model(x), expected)
    weights.pop("linear1.weight")
    with pytest.raises(DispatchError, match=r"linear1\.weight"):
        add_hook_to_module(ModelForTest(), AlignDevicesHook(execution_device, offload=True, weights_map=weights, place_submodules=True))


def test_hooks_may_run_by_hand_in_any_nesting(execution_device):
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AlignDevicesHook(execution_device, offload=True, io_same_device=True))
    hook = layer._hf_hook
    assert hook.pre_forward(layer) == ((), {})
    assert layer.weight.device == execution_device
    hook.pre_forward(layer)
    assert hook.post_forward(layer, ()) == ()
    assert layer.weight.device == execution_device
    assert hook.post_forward(layer, None) is None
    assert layer.weight.device.type == "meta"


def test_io_same_device_can_be_set_on_the_live_hook(accelerators):
    (device,) = accelerators(1)
    model = ModelForTest().eval()
    add_hook_to_module(model, AlignDevicesHook(device, place_submodules=True))
    assert model(torch.randn(2, 3)).device == device
    model._hf_hook.io_same_device = True
    assert model(torch.randn(2, 3)).device == CPU


def test_a_hook_that_is_built_anew_from_its_attributes(execution_device):
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AlignDevicesHook(execution_device, io_same_device=True))
    old = layer._hf_hook
    names = [name for name in inspect.signature(type(old).__init__).parameters if name in old.__dict__]
    remove_hook_from_module(layer)
    add_hook_to_module(layer, type(old)(**{name: old.__dict__[name] for name in names}))
    assert layer(torch.randn(2, 3)).device == CPU


# --- Arguments ---


@dataclass
class Batch:
    ids: torch.Tensor
    note: str = ""


class Cache:
    """An object with a state of its own, as KV caches are."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def to(self, *_: Any) -> Cache:
        raise AssertionError("a cache is never moved")


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = (args, kwargs)
        return args[0] if args else None


def test_containers_in_place_are_passed_on_as_they_are(execution_device):
    module = Recorder()
    add_hook_to_module(module, AlignDevicesHook(execution_device, io_same_device=True))
    here = torch.zeros(1, device=execution_device)
    given = ({"a": here}, [here, 1], defaultdict(list, a=[here]), UserDict(a=here), Batch(here), Cache(), (here, None))
    module(*given, state=given[0])
    args, kwargs = module.got
    assert all(one is other for one, other in zip(args, given, strict=True))
    assert kwargs["state"] is given[0]


def test_what_must_move_is_moved_once_and_nothing_else(accelerators):
    (device,) = accelerators(1)
    module = Recorder()
    add_hook_to_module(module, AlignDevicesHook(device))
    there, here = torch.arange(3), torch.zeros(1, device=device)
    module(there, {"a": there, "b": here}, defaultdict(list, a=[there]), UserDict(a=there), Batch(there, "kept"), key=there)
    (first, mapping, default, user, batch), kwargs = module.got
    assert first.device == device
    assert mapping["a"] is first
    assert mapping["b"] is here
    assert kwargs["key"] is first
    assert type(default) is defaultdict
    assert default["missing"] == []
    assert default["a"][0] is first
    assert type(user) is UserDict
    assert user["a"] is first
    assert batch.ids is first
    assert batch.note == "kept"


def test_writes_to_a_moved_container_reach_the_callers(accelerators):
    (device,) = accelerators(1)

    class Writer(nn.Module):
        def forward(self, state: dict[str, Any], items: list[Any], batch: Batch) -> None:
            state["new"] = state["x"] + 1
            del state["old"]
            items.append(1)
            batch.note = "written"

    module = Writer()
    add_hook_to_module(module, AlignDevicesHook(device))
    x = torch.zeros(1)
    state, items, batch = {"x": x, "old": 1}, [x], Batch(x)
    module(state, items, batch)
    assert state.keys() == {"x", "new"}
    assert state["x"] is x
    assert items[0] is x
    assert items[1] == 1
    assert batch.note == "written"
    assert batch.ids is x


@pytest.mark.parametrize("skip_keys", ["cache", ["cache", "other"]])
def test_skip_keys(accelerators, skip_keys):
    (device,) = accelerators(1)

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
            return x, cache

    module = Module()
    add_hook_to_module(module, AlignDevicesHook(device, io_same_device=True, skip_keys=skip_keys))
    x, cache = torch.zeros(1), torch.ones(1)
    for output in (module(x, cache), module(x, cache=cache), module(x=x, cache=cache)):
        assert output[1] is cache
    module.forward(x, {"cache": cache, "x": x})
    add_hook_to_module(module, AlignDevicesHook(device, skip_keys=skip_keys))
    output = module(x, {"nested": {"cache": cache, "x": x}})
    assert output[1]["nested"]["cache"] is cache or skip_keys == ["cache"]
    assert output[0].device == device


# --- Attaching ---


def leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_attach_align_device_hook(execution_device):
    model, ids, expected = tiny()
    weights = leaves(model)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    attach_align_device_hook(model, execution_device, offload=True, weights_map=weights)
    assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())
    assert not hasattr(model.layers, "_hf_hook")
    assert isinstance(model.layers[0].norm._hf_hook, AlignDevicesHook)
    assert torch.equal(model.layers[0].norm._hf_hook.weights_map["weight"], weights["layers.0.norm.weight"])
    assert model.head.weight is model.embed.weight
    for _ in range(2):
        assert torch.equal(model(ids), expected)
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embed.weight
    model.to("cpu")
    assert torch.equal(model(ids), expected)


def test_attach_with_preloaded_classes(execution_device):
    model, ids, expected = tiny()
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    attach_align_device_hook(model, execution_device, offload=True, preload_module_classes=["Block"])
    assert isinstance(model.layers[0]._hf_hook, AlignDevicesHook)
    assert not hasattr(model.layers[0].up, "_hf_hook")
    assert torch.equal(model(ids), expected)


def test_attach_on_blocks(accelerators):
    first, second = accelerators(2)
    model, ids, expected = tiny(tie=False)
    attach_align_device_hook_on_blocks(
        model,
        {"": first, "embed": first, "layers": second, "norm": second, "head": first},
        {"": False, "embed": False, "layers": True, "norm": False, "head": True},
        weights_map=leaves(model),
    )
    assert model._hf_hook.io_same_device
    assert torch.equal(model(ids), expected)
    assert model.norm.weight.device == second
    remove_hook_from_submodules(model)


def test_attach_on_one_block(execution_device):
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    attach_align_device_hook_on_blocks(model, execution_device, offload=True)
    assert torch.equal(model(x).cpu(), expected)
    remove_hook_from_submodules(model)
    model.to("cpu")
    attach_align_device_hook_on_blocks(model, execution_device)
    assert model.linear1.weight.device == execution_device
    assert torch.equal(model(x), expected)


def test_attach_execution_device_hook(accelerators):
    (device,) = accelerators(1)
    model = ModelForTest().eval()
    attach_execution_device_hook(model, device)
    assert {type(module._hf_hook) for module in model.modules()} == {AlignDevicesHook}
    assert model(torch.randn(2, 3)).device == device


# --- Whole models in turn, and small dtypes at rest ---


def test_cpu_offload_moves_at_every_call(accelerators):
    (device,) = accelerators(1)
    first, second = ModelForTest().eval(), ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = first(x)
    hook = CpuOffload(execution_device=device)
    add_hook_to_module(first, hook)
    user_hook = UserCpuOffloadHook(first, hook)
    add_hook_to_module(second, CpuOffload(execution_device=0, prev_module_hook=user_hook))
    for _ in range(2):
        output = first(x)
        assert output.device == device
        assert torch.equal(output.cpu(), expected)
        assert first.linear1.weight.device == device
    second(x)
    assert first.linear1.weight.device == CPU
    first(x)
    user_hook.offload()
    assert first.linear1.weight.device == CPU
    user_hook.remove()
    assert torch.equal(first(x), expected)


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn])
def test_layerwise_casting(storage):
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    attach_layerwise_casting_hooks(model, storage, torch.float32, skip_modules_pattern=["linear2"])
    assert model.linear1.weight.dtype == model.linear1.bias.dtype == storage
    assert model.batchnorm.weight.dtype == model.linear2.weight.dtype == torch.float32
    assert isinstance(model.linear1._hf_hook, LayerwiseCastingHook)
    reference = copy.deepcopy(model)
    remove_hook_from_submodules(reference)
    expected = reference.float()(x)
    wrong = []

    def work() -> None:
        wrong.extend(1 for _ in range(20) if not torch.equal(model(x), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert model.linear1.weight.dtype == storage


# --- Questions and single weights ---


def test_align_module_device(execution_device):
    model, _ids, _expected = tiny()
    dispatch(model, {"": "disk"}, main_device=execution_device, store=_store(model))
    values = get_parameter(model, "layers.0.up.weight")
    for part, device in ((model.layers[0].up, None), (model.layers[0].up, "cpu")):
        with align_module_device(part, device):
            assert part.weight.device == (execution_device if device is None else CPU)
            assert torch.equal(part.weight.cpu(), values)
        assert isinstance(part.weight, LazyTensor)
    with align_module_device(model.layers[0].up, "cpu"), torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    assert torch.equal(get_parameter(model, "layers.0.up.weight"), values * 2)
    plain = nn.Linear(2, 2)
    with align_module_device(plain, "meta"):
        assert plain.weight.device.type == "meta"
    assert plain.weight.device == CPU


def _store(model: nn.Module) -> Any:
    from bigmodel.dispatch import MappingStore

    return MappingStore(leaves(model), kind="disk")


def test_get_and_update_parameter(execution_device):
    model, ids, _ = tiny()
    reference, _, _ = tiny()
    dispatch(model, {"": "disk"}, main_device=execution_device, store=_store(model))
    value = torch.randn(16, 8)
    update_parameter(model, "layers.0.up.weight", value)
    reference.layers[0].up.weight.data.copy_(value)
    assert torch.equal(get_parameter(model, "layers.0.up.weight"), value)
    table = torch.randn(20, 8)
    update_parameter(model, "head.weight", table)
    assert torch.equal(get_parameter(model, "embed.weight"), table)
    reference.head.weight.data.copy_(table)
    with torch.no_grad():
        assert torch.equal(model(ids), reference(ids))
    with pytest.raises(DispatchError, match=r"no parameter or buffer 'layers\.9\.up\.weight'"):
        get_parameter(model, "layers.9.up.weight")
    with pytest.raises(DispatchError, match="shape"):
        update_parameter(model, "head.weight", torch.zeros(2))


def test_placement_answers_where_everything_is(execution_device):
    model, ids, _ = tiny()
    dispatch(model, {"": "disk"}, main_device=execution_device, store=_store(model))
    with torch.no_grad():
        for _ in range(3):
            model(ids)
    place = placement(model)
    block = place["layers.2"]
    assert (block.rests, block.runs, block.tensors) == ("disk", str(execution_device), 6)
    assert block.nbytes == sum(p.numel() * p.element_size() for p in model.layers[2].parameters())
    assert block.counters.forwards == 3
    assert place.offloaded_bytes + place.resident_bytes == sum(
        t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]
    )
    assert place.bytes_moved >= 3 * block.nbytes
    assert "layers.2" in str(place)
    plain = placement(TinyModel())
    assert plain.offloaded_bytes == 0
    assert isinstance(str(plain), str)


def test_mapping_types() -> None:
    from bigmodel.dispatch import as_store

    class Files(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return {"a": torch.arange(6.0).view(3, 2)}[name]

        def __iter__(self) -> Any:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    store = as_store(Files())
    rows = torch.empty(2, 2)
    store.read_rows("a", torch.tensor([2, 0]), rows)
    assert rows.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    store.write("a", torch.zeros(3, 2))
    store.read_rows("a", torch.tensor([2, 0]), rows)
    assert rows.sum() == 0
    with pytest.raises(KeyError):
        store.spec("b")
