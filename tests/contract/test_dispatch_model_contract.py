"""Behaviour §1: `dispatch_model`."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from contract_models import ReadsItsChild, Tied, copy_of, devices, ready
from model_for_test import ModelForTest
from safetensors.torch import save_file
from torch import nn

import bigmodel.big_modeling
from bigmodel import dispatch_model
from bigmodel.hooks import AlignDevicesHook, remove_hook_from_module, remove_hook_from_submodules
from bigmodel.utils import OffloadedWeightsLoader, offload_state_dict

CPU_AND_DISK = {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
GPU_AND_ALL = {"linear1": "cpu", "batchnorm": 0, "linear2": "disk"}


def test_cpu_and_disk(tmp_path):
    model, x, expected = ready()
    assert dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path) is model
    assert model.linear1.weight.device.type == "meta"
    assert model.linear2.weight.device.type == "meta"
    assert model.batchnorm.weight.device.type == "cpu"
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    assert model.hf_device_map == CPU_AND_DISK
    assert model.hf_device_map is not CPU_AND_DISK


def test_an_accelerator_cpu_and_disk(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, x, expected = ready()
    dispatch_model(model, GPU_AND_ALL, offload_dir=tmp_path)
    assert model.linear1.weight.device.type == "meta"
    assert model.batchnorm.weight.device == device
    assert model.linear2.weight.device.type == "meta"
    with torch.no_grad():
        output = model(x)
        assert torch.equal(output, expected)
        assert output.device.type == "cpu"
        assert model(x.to(device)).device == device


@pytest.mark.parametrize("device_map", [{"linear1": "disk", "batchnorm": "disk", "linear2": "disk"}, {"": "disk"}])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_everything_on_disk(tmp_path, device_map, offload_buffers):
    model, x, expected = ready()
    dispatch_model(model, device_map, offload_dir=str(tmp_path), offload_buffers=offload_buffers)
    assert (model.batchnorm.running_mean.device.type == "meta") == offload_buffers
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


def test_a_map_with_a_default_and_an_exception(tmp_path, accelerators):
    accelerators(1)
    model, x, expected = ready()
    dispatch_model(model, {"": "cpu", "linear2": 0})
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert model.linear1.weight.device.type == "meta"


def test_several_accelerators(accelerators):
    first, second = accelerators(2)
    model, x, expected = ready()
    dispatch_model(model, {"linear1": 0, "batchnorm": 1, "linear2": 0})
    assert model.linear1.weight.device == first
    assert model.batchnorm.running_mean.device == second
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_values_may_be_devices_and_names(accelerators):
    first, second = accelerators(2)
    model, x, expected = ready()
    written = {"linear1": first, "batchnorm": "sim:1", "linear2": torch.device("cpu")}
    dispatch_model(model, written)
    assert model.hf_device_map == written
    assert model.batchnorm.weight.device == second
    assert model.linear2.weight.device.type == "meta"
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_offloaded_modules_run_on_the_main_device(accelerators):
    first, second = accelerators(2)
    for main_device, expected_device in ((None, second), (0, first), ("sim:0", first), ("sim:1", second)):
        model, x, expected = ready()
        seen = []
        model.linear1.register_forward_hook(lambda module, arguments, output, seen=seen: seen.append(output.device))
        dispatch_model(model, {"linear1": "cpu", "batchnorm": 1, "linear2": 0}, main_device=main_device)
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        assert seen == [expected_device]


def test_one_device_means_no_hooks_unless_asked(accelerators):
    (device,) = accelerators(1)
    model, x, expected = ready()
    dispatch_model(model, {"": 0})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert model.linear1.weight.device == device
    assert model.hf_device_map == {"": 0}
    model, x, expected = ready()
    dispatch_model(model, {"": 0}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_one_device_in_several_entries(accelerators):
    (device,) = accelerators(1)
    model, _, _ = ready()
    dispatch_model(model, {"linear1": 0, "batchnorm": 0, "linear2": 0})
    assert not hasattr(model, "_hf_hook")
    assert {tensor.device for tensor in model.state_dict().values()} == {device}
    assert model.hf_device_map == {"linear1": 0, "batchnorm": 0, "linear2": 0}


def test_an_empty_model_on_one_device_is_torchs_error():
    with pytest.raises(NotImplementedError):
        dispatch_model(nn.Linear(2, 2, device="meta"), {"": "cpu"})


def test_disk_without_a_folder():
    model, _, _ = ready()
    with pytest.raises(ValueError, match=r"We need an `offload_dir` to dispatch this model according to this `device_map`.*1.*linear2"):
        dispatch_model(model, CPU_AND_DISK)
    assert set(devices(model).values()) == {"cpu"}
    assert not hasattr(model, "hf_device_map")


def test_a_map_that_leaves_parameters_out():
    model, _, _ = ready()
    with pytest.raises(ValueError, match=r"does not give any device for the following parameters: linear2\.weight, linear2\.bias"):
        dispatch_model(model, {"linear1": "cpu", "batchnorm": "cpu"})


def test_a_key_that_names_nothing_warns():
    model, _, _ = ready()
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['lineer'\]"):
        dispatch_model(model, {"": "cpu", "lineer": "cpu"})


def test_the_check_can_be_patched_where_libraries_patch_it(monkeypatch):
    calls = []
    monkeypatch.setattr(bigmodel.big_modeling, "check_device_map", lambda model, device_map: calls.append(dict(device_map)))
    model, _, _ = ready()
    dispatch_model(model, {"": "cpu"})
    assert calls == [{"": "cpu"}]


def test_an_index_into_safetensors_files(tmp_path):
    model, x, expected = ready()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    index = {
        name: {"safetensors_file": str(tmp_path / "weights.safetensors"), "weight_name": name, "dtype": "float32"}
        for name in ("linear2.weight", "linear2.bias")
    }
    model.linear2 = nn.Linear(4, 5, device="meta")
    dispatch_model(model, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}, offload_index=index)
    torch.testing.assert_close(model(x), expected)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["weights.safetensors"]


def test_an_index_with_its_folder_and_other_names_in_the_file(tmp_path, execution_device):
    model, x, expected = ready()
    save_file({"weight.of.two": model.linear2.weight, "bias.of.two": model.linear2.bias}, tmp_path / "weights.safetensors")
    index = {
        f"linear2.{kind}": {"safetensors_file": str(tmp_path / "weights.safetensors"), "weight_name": f"{kind}.of.two", "dtype": "float32"}
        for kind in ("weight", "bias")
    }
    dispatch_model(
        model,
        {"linear1": execution_device, "batchnorm": execution_device, "linear2": "disk"},
        offload_index=index,
        offload_dir=tmp_path,
    )
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_a_folder_that_was_written_before(tmp_path):
    model, x, expected = ready()
    offload_state_dict(tmp_path, model.state_dict())
    time = (tmp_path / "linear1.weight.dat").stat().st_mtime_ns
    dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
    assert (tmp_path / "linear1.weight.dat").stat().st_mtime_ns == time
    torch.testing.assert_close(model(x), expected)


def test_own_state_dict_for_the_modules_on_cpu(accelerators):
    accelerators(1)
    model, x, expected = ready()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.linear1 = nn.Linear(3, 4, device="meta")
    dispatch_model(model, {"linear1": "cpu", "batchnorm": 0, "linear2": 0}, state_dict=values)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_offloaded_parameters_are_told_of(tmp_path, caplog, accelerators):
    accelerators(1)
    model, _, _ = ready()
    with caplog.at_level(logging.WARNING, logger="bigmodel.big_modeling"):
        dispatch_model(model, GPU_AND_ALL, offload_dir=tmp_path)
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("bigmodel.big_modeling", "WARNING", "Some parameters are on the meta device because they were offloaded to the cpu and disk.")
    ]


def test_modules_that_stay_on_a_cpu_that_computes_are_not_offloaded(tmp_path, caplog):
    model, _, _ = ready()
    with caplog.at_level(logging.WARNING, logger="bigmodel.big_modeling"):
        dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "Some parameters are on the meta device because they were offloaded to the disk."
    ]


def moved(caplog):
    return [record for record in caplog.records if "You shouldn't move a model that is dispatched using" in record.getMessage()]


@pytest.mark.parametrize(
    "move", [lambda model: model.to("cpu"), lambda model: model.to(device="cpu"), lambda model: model.to(torch.zeros(1)), "cuda"]
)
def test_moving_an_offloaded_model_warns_and_is_refused(tmp_path, caplog, move):
    model, x, expected = ready()
    dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="You can't move a model that has some modules offloaded to cpu or disk"):
        model.cuda() if move == "cuda" else move(model)
    assert [(record.name, record.levelname) for record in moved(caplog)] == [("bigmodel.big_modeling", "WARNING")]
    torch.testing.assert_close(model(x), expected)


def test_changing_dtype_or_layout_is_no_move(tmp_path, caplog):
    model, x, expected = ready()
    dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
    assert model.to(torch.float64) is model
    output = model(x.double())
    assert output.dtype == torch.float64
    torch.testing.assert_close(output.float(), expected, atol=1e-5, rtol=0)
    model.to(memory_format=torch.contiguous_format)
    model.float()
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    assert moved(caplog) == []


def test_moving_a_spread_model_warns_and_moves(caplog, accelerators):
    first, _ = accelerators(2)
    model, _, _ = ready()
    dispatch_model(model, {"linear1": 0, "batchnorm": 1, "linear2": 1})
    model.to(first)
    assert len(moved(caplog)) == 1
    assert {tensor.device for tensor in model.state_dict().values()} == {first}


def test_after_the_hooks_are_off_the_model_moves_silently(tmp_path, caplog, accelerators):
    (device,) = accelerators(1)
    model, x, expected = ready()
    dispatch_model(model, GPU_AND_ALL, offload_dir=tmp_path)
    remove_hook_from_submodules(model)
    model.to(device)
    assert moved(caplog) == []
    with torch.no_grad():
        assert torch.equal(model(x.to(device)).cpu(), expected)
    assert not any(hasattr(module, "_hf_hook") or hasattr(module, "_old_forward") for module in model.modules())


class HasDevice(ModelForTest):
    @property
    def device(self) -> torch.device:
        return self.linear1.weight.device


@pytest.mark.parametrize("way", ["dispatch", "root alone", "copy"])
def test_after_the_hooks_are_off_the_model_is_a_plain_one(tmp_path, accelerators, way):
    (device,) = accelerators(1)
    model = HasDevice().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    if way == "root alone":
        model = nn.Linear(3, 4)
        kind, expected = nn.Linear, model(x)
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
        remove_hook_from_module(model)
    else:
        kind = HasDevice
        dispatch_model(model, GPU_AND_ALL, offload_dir=tmp_path)
        assert model.device == device
        model = copy.deepcopy(model) if way == "copy" else model
        remove_hook_from_submodules(model)
        model.to("cpu")
        assert model.device.type == "cpu"
        model.to(device)
        assert model.device == device
        model.to("cpu")
    assert type(model) is kind
    assert not any(name.startswith("_bigmodel") for name in vars(model))
    assert torch.equal(model(x), expected)
    torch.save(model, tmp_path / "whole.bin")
    assert torch.equal(torch.load(tmp_path / "whole.bin", weights_only=False)(x), expected)


def test_hooks_of_the_root_alone_leave_the_blocks_dispatched(tmp_path):
    model, x, expected = ready()
    dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
    remove_hook_from_module(model)
    assert model.linear1.weight.device.type == "meta"
    torch.testing.assert_close(model(x), expected)


def test_tied_weights_stay_one_object(tmp_path, accelerators):
    accelerators(1)
    for device_map in (
        {"embed": 0, "middle": "cpu", "head": 0},
        {"embed": "cpu", "middle": 0, "head": "cpu"},
        {"embed": "disk", "middle": 0, "head": "disk"},
        {"embed": "disk", "middle": "cpu", "head": 0},
    ):
        torch.manual_seed(0)
        model = Tied()
        model.tie_weights()
        ids = torch.tensor([[1, 2, 3]])
        expected = model(ids)
        dispatch_model(model, device_map, offload_dir=tmp_path)
        assert model.head.weight is model.embed.weight
        with torch.no_grad():
            assert torch.equal(model(ids), expected)
        assert model.head.weight is model.embed.weight


def test_tied_weights_are_on_the_device_once(accelerators):
    (device,) = accelerators(1)
    model = Tied()
    model.embed = nn.Embedding(1000, 6)
    model.tie_weights()
    ids = torch.tensor([[1, 2]])
    for device_map in ({"embed": 0, "middle": 0, "head": 0}, {"embed": 0, "middle": "cpu", "head": "cpu"}):
        dispatch_model(model, device_map, force_hooks=True)
        torch.sim.reset_peak_memory_stats(device)
        with torch.no_grad():
            model(ids)
        assert torch.sim.max_memory_allocated(device) < 1.5 * model.embed.weight.nbytes


def test_nested_modules_that_share_an_offloaded_weight_bring_it_once(accelerators):
    (device,) = accelerators(1)

    class Inner(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.weight = shared
            self.own = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.own + self.weight.max()

    class Outer(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.weight = shared
            self.inner = Inner(shared)

        def forward(self, x):
            return x * self.weight.min() + self.inner(x)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.randn(200, 200))
            self.first, self.second = Outer(shared), Outer(shared)

        def forward(self, x):
            return self.second(self.first(x))

    model = Both()
    x = torch.ones(2)
    expected = model(x)
    address, nbytes = model.first.weight.data_ptr(), model.first.weight.nbytes
    dispatch_model(model, {"first": "cpu", "second.inner.own": 0, "second": "cpu"})
    assert model.first._hf_hook.weights_map["weight"].data_ptr() == address
    assert model.first.weight is model.second.inner.weight
    torch.sim.reset_peak_memory_stats(device)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), expected)
    assert torch.sim.max_memory_allocated(device) < 1.5 * nbytes
    assert model.first._hf_hook.tied_params_map[address] == {}
    assert model.second._hf_hook.tied_params_map[address] == {}


def test_a_deep_copy_is_independent(tmp_path):
    model, x, expected = ready()
    dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
    copied = copy.deepcopy(model)
    assert copied.linear1.forward is not model.linear1.forward
    torch.testing.assert_close(copied(x), expected)
    with torch.no_grad():
        copied.batchnorm.weight.zero_()
    assert not torch.allclose(copied(x), expected)
    torch.testing.assert_close(model(x), expected)
    part = copy.deepcopy(model.linear1)
    torch.testing.assert_close(part(x), model.linear1(x))


def test_non_persistent_buffers_with_offloaded_buffers(tmp_path, execution_device):
    class WithTable(ModelForTest):
        def __init__(self) -> None:
            super().__init__()
            self.linear2.register_buffer("table", torch.arange(5.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.linear2.table.to(x.device)

    torch.manual_seed(0)
    model = WithTable().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    dispatch_model(
        model,
        {"linear1": "disk", "batchnorm": "disk", "linear2": "disk"},
        main_device=execution_device,
        offload_dir=tmp_path,
        offload_buffers=True,
    )
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_preloaded_classes(tmp_path, accelerators):
    accelerators(1)
    model = nn.Sequential(nn.Linear(3, 3), ReadsItsChild())
    x = torch.randn(2, 3)
    expected = model(x)
    dispatch_model(model, {"0": 0, "1": "disk"}, offload_dir=tmp_path, preload_module_classes=["ReadsItsChild"])
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_skipped_keys_stay_where_they_are(accelerators):
    (device,) = accelerators(1)

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, past=None):
            return self.linear(x), past

    for keys in ("past", ["past"]):
        model = nn.ModuleDict({"a": Keeps(), "b": nn.Linear(3, 3)})
        model.forward = lambda x, past=None, model=model: model["a"](x, past=past)
        dispatch_model(model, {"a": 0, "b": "cpu"}, skip_keys=keys)
        past = {"key": torch.zeros(2)}
        with torch.no_grad():
            output, given = model["a"](torch.randn(2, 3), past=past)
        assert output.device == device
        assert given is past
        assert given["key"].device.type == "cpu"


def test_dispatching_anew_with_another_map(tmp_path, accelerators):
    accelerators(2)
    model, x, expected = ready()
    for device_map in (GPU_AND_ALL, {"linear1": 0, "batchnorm": 1, "linear2": "cpu"}, CPU_AND_DISK, {"": 0}, {"": 1}):
        dispatch_model(model, device_map, offload_dir=tmp_path)
        assert model.hf_device_map == device_map
        if len(device_map) == 1:
            assert not hasattr(model, "_hf_hook")
            x = x.to(f"sim:{device_map['']}")  # without hooks the caller brings the input
        with torch.no_grad():
            assert torch.equal(model(x).cpu(), expected)


def test_attributes_that_libraries_read(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, x, _ = ready()
    dispatch_model(model, GPU_AND_ALL, offload_dir=tmp_path)
    hook = model._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert hook.io_same_device is True
    assert torch.device("sim", torch.device(hook.execution_device).index or 0) == device
    assert hook.offload is False
    assert hook.weights_map is None or len(hook.weights_map) >= 0
    assert callable(model._old_forward)
    hook.io_same_device = False
    with torch.no_grad():
        assert model(x).device == device
    for name, tensor in copy_of(ready()[0]).named_parameters():
        parent = model.get_submodule(name.rpartition(".")[0])
        if parent.get_parameter(name.rpartition(".")[2]).device.type == "meta":
            assert torch.equal(parent._hf_hook.weights_map[name.rpartition(".")[2]].cpu(), tensor.detach())


def test_weights_map_of_the_nearest_hooked_ancestor(tmp_path, execution_device):
    """What `load_offloaded_parameter` of transformers does when it saves or resizes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            return x + self.inner(self.norm(x))

    model = nn.Sequential(nn.ModuleList([Block(), Block()]), nn.Linear(4, 4))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    dispatch_model(model, {"0.0": "disk", "0.1": "disk", "1": execution_device}, offload_dir=tmp_path)
    for name, value in plain.items():
        if model.get_parameter(name).device.type != "meta":
            continue
        path = name.split(".")
        for depth in range(len(path) - 1, -1, -1):
            module = model.get_submodule(".".join(path[:depth]))
            if hasattr(module, "_hf_hook"):
                assert torch.equal(module._hf_hook.weights_map[".".join(path[depth:])].cpu(), value)
                break
        else:
            pytest.fail(f"no hook above {name}")


def test_no_warning_without_a_reason(tmp_path):
    model, x, _ = ready()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch_model(model, CPU_AND_DISK, offload_dir=tmp_path)
        with torch.no_grad():
            model(x)


def test_a_state_dict_and_a_folder_together(tmp_path, accelerators):
    accelerators(1)
    model, x, expected = ready()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("linear1")}
    dispatch_model(model, GPU_AND_ALL, state_dict=values, offload_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert sorted(OffloadedWeightsLoader(save_folder=tmp_path)) == ["linear2.bias", "linear2.weight"]
