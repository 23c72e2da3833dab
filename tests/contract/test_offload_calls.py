"""Behaviour §1: `cpu_offload`, `cpu_offload_with_hook`, `disk_offload`."""

from __future__ import annotations

import json

import pytest
import torch
from contract_models import ReadsItsChild, copy_of, devices, ready
from torch import nn

from bigmodel import cpu_offload, cpu_offload_with_hook, disk_offload, placement
from bigmodel.hooks import UserCpuOffloadHook, remove_hook_from_submodules

PARAMETERS = ("linear1.weight", "linear1.bias", "batchnorm.weight", "batchnorm.bias", "linear2.weight", "linear2.bias")


@pytest.fixture(params=["cpu", "disk"])
def offload(request, tmp_path):
    """`cpu_offload`, and `disk_offload` into a folder of its own."""
    if request.param == "cpu":
        return cpu_offload
    folders = iter(range(100))
    return lambda model, **arguments: disk_offload(model, tmp_path / str(next(folders)), **arguments)


def test_the_model_comes_back_with_its_parameters_on_meta(offload):
    model, x, expected = ready()
    assert offload(model) is model
    assert {name: device for name, device in devices(model).items() if name in PARAMETERS} == dict.fromkeys(PARAMETERS, "meta")
    assert devices(model)["batchnorm.running_mean"] == "cpu"
    for _ in range(3):
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
        assert model.linear1.weight.device.type == "meta"


def test_buffers_are_offloaded_on_demand(offload):
    model, x, expected = ready()
    offload(model, offload_buffers=True)
    assert set(devices(model).values()) == {"meta"}
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


def test_hooks_come_off_and_it_can_be_done_again(offload):
    model, x, expected = ready()
    offload(model)
    remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    offload(model, offload_buffers=True)
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


def test_twice_is_once(offload):
    model, x, expected = ready()
    offload(model)
    offload(model)
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


def test_weights_that_rest_in_ram_are_not_copied():
    model, x, expected = ready()
    address = model.linear1.weight.data_ptr()
    for _ in range(2):
        cpu_offload(model)
        assert model.linear1._hf_hook.weights_map["weight"].data_ptr() == address
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    assert model.linear1.weight.device.type == "meta"


def test_from_ram_to_disk_and_back(tmp_path):
    model, x, expected = ready()
    for offload, rests in ((cpu_offload, "cpu"), (lambda model: disk_offload(model, tmp_path), "disk"), (cpu_offload, "cpu")):
        offload(model)
        assert {row.rests for row in placement(model).rows if row.counters is not None} == {rests}
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("classes", [None, ["ReadsItsChild"]])
def test_weights_that_a_parent_reads_itself(offload, execution_device, classes):
    model = nn.Sequential(nn.Linear(3, 3), ReadsItsChild())
    x = torch.randn(2, 3)
    expected = model(x)
    offload(model, execution_device=execution_device, preload_module_classes=classes)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_computes_on_the_device_and_answers_where_the_input_was(offload, execution_device):
    model, x, expected = ready()
    seen = []
    model.linear2.register_forward_hook(lambda module, arguments, output: seen.append((arguments[0].device, output.device)))
    offload(model, execution_device=execution_device)
    with torch.no_grad():
        output = model(x)
        on_device = model(x.to(execution_device))
    assert set(seen) == {(execution_device, execution_device)}
    assert output.device.type == "cpu"
    assert on_device.device == execution_device
    assert torch.equal(output, expected)
    assert torch.equal(on_device.cpu(), expected)
    assert model.batchnorm.running_mean.device == execution_device


def test_own_state_dict_is_used(execution_device):
    model, x, _ = ready()
    values = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    other = copy_of(model)
    other.load_state_dict(values)
    other.batchnorm.load_state_dict({**other.batchnorm.state_dict(), "running_mean": model.batchnorm.running_mean})
    other.batchnorm.running_var.copy_(model.batchnorm.running_var)
    cpu_offload(model, execution_device=execution_device, state_dict=values)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_positional_arguments(execution_device):
    model, x, expected = ready()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, execution_device, True, values, None)
    assert set(devices(model).values()) == {"meta"}
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_a_device_may_be_an_index_or_a_name(accelerators):
    (device,) = accelerators(1)
    for written in (0, "sim:0", device):
        model, x, expected = ready()
        cpu_offload(model, execution_device=written)
        with torch.no_grad():
            assert torch.equal(model(x), expected)


def test_the_default_device_is_the_first_parameters(accelerators):
    (device,) = accelerators(1)
    model, x, expected = ready()
    model.to(device)
    cpu_offload(model)
    assert model.batchnorm.running_mean.device == device
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_disk_writes_parameters_and_persistent_buffers(tmp_path):
    model, _, _ = ready()
    disk_offload(model, tmp_path / "folder")
    index = json.loads((tmp_path / "folder" / "index.json").read_text())
    assert sorted(index) == sorted(model.state_dict())
    assert index["linear1.weight"] == {"dtype": "float32", "shape": [4, 3]}
    assert (tmp_path / "folder" / "linear1.weight.dat").stat().st_size == 48


def test_disk_uses_what_was_written_before(tmp_path):
    model, x, expected = ready()
    again = copy_of(model)
    disk_offload(model, tmp_path)
    time = (tmp_path / "linear1.weight.dat").stat().st_mtime_ns
    disk_offload(again, tmp_path)
    assert (tmp_path / "linear1.weight.dat").stat().st_mtime_ns == time
    torch.testing.assert_close(again(x), expected)


def test_disk_folder_of_another_model_is_refused(tmp_path):
    model, _, _ = ready()
    disk_offload(model, tmp_path)
    with pytest.raises(ValueError, match="Delete the folder"):
        disk_offload(nn.Sequential(nn.Linear(3, 4)), tmp_path)


def test_disk_positional_arguments(tmp_path, execution_device):
    model, x, expected = ready()
    disk_offload(model, str(tmp_path), execution_device, True, None)
    assert set(devices(model).values()) == {"meta"}
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_a_whole_model_moves_and_stays_until_it_is_offloaded(accelerators):
    (device,) = accelerators(1)
    model, x, expected = ready()
    model, hook = cpu_offload_with_hook(model, execution_device=device)
    assert isinstance(hook, UserCpuOffloadHook)
    assert set(devices(model).values()) == {"cpu"}
    with torch.no_grad():
        for _ in range(2):
            output = model(x)
            assert output.device == device
            assert torch.equal(output.cpu(), expected)
            assert {tensor.device for tensor in model.state_dict().values()} == {device}
    hook.offload()
    assert set(devices(model).values()) == {"cpu"}
    hook.remove()
    assert not hasattr(model, "_hf_hook")
    assert torch.equal(model(x), expected)


def test_models_take_turns(accelerators):
    (device,) = accelerators(1)
    first, first_hook = cpu_offload_with_hook(nn.Linear(3, 3), device)
    second, second_hook = cpu_offload_with_hook(nn.Linear(3, 3), device, prev_module_hook=first_hook)
    x = torch.randn(2, 3)
    with torch.no_grad():
        for _ in range(2):
            hidden = first(x)
            assert first.weight.device == device
            second(hidden)
            assert first.weight.device.type == "cpu"
            assert second.weight.device == device
            second_hook.offload()


@pytest.mark.parametrize("spelling", [0, "sim", "sim:0"])
def test_whole_models_with_any_spelling_of_the_device(accelerators, spelling):
    (device,) = accelerators(1)
    model, hook = cpu_offload_with_hook(nn.Linear(3, 3), spelling)
    with torch.no_grad():
        assert model(torch.randn(2, 3)).device == device
        assert model(torch.randn(2, 3)).device == device
    hook.offload()
    assert model.weight.device.type == "cpu"


def test_default_device_of_whole_models_is_the_accelerator(accelerators):
    (device,) = accelerators(1)
    model, _ = cpu_offload_with_hook(nn.Linear(3, 3))
    with torch.no_grad():
        assert model(torch.randn(2, 3)).device == device
