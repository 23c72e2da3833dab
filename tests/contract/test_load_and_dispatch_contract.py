"""Behaviour §1: `load_checkpoint_and_dispatch`."""

from __future__ import annotations

import json
import os

import pytest
import torch
from contract_models import Bigger, ReadsItsChild, devices, ready
from model_for_test import ModelForTest
from safetensors.torch import save_file
from torch import nn

from bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from bigmodel.hooks import remove_hook_from_submodules


def empty(kind=ModelForTest):
    with init_empty_weights():
        return kind().eval()


@pytest.fixture(params=["bin", "safetensors", "sharded"])
def checkpoint(request, tmp_path):
    """A checkpoint of the model, its input, and its output."""
    model, x, expected = ready()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = model.state_dict()
    if request.param == "bin":
        path = folder / "pytorch_model.bin"
        torch.save(state, path)
    elif request.param == "safetensors":
        path = folder / "model.safetensors"
        save_file(state, path, metadata={"format": "pt"})
    else:
        path = folder
        names = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(state)}
        for part in set(names.values()):
            save_file({name: state[name] for name in state if names[name] == part}, folder / part, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path, x, expected


def test_without_a_map_it_only_loads(checkpoint):
    path, x, expected = checkpoint
    for model in (empty(), ModelForTest().eval()):
        assert load_checkpoint_and_dispatch(model, path) is model
        assert set(devices(model).values()) == {"cpu"}
        assert not hasattr(model, "hf_device_map")
        assert not hasattr(model, "_hf_hook")
        assert torch.equal(model(x), expected)


def test_one_device_means_no_hooks(checkpoint, execution_device):
    path, x, expected = checkpoint
    model = load_checkpoint_and_dispatch(empty(), str(path), device_map={"": execution_device})
    assert model.hf_device_map == {"": execution_device}
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert {tensor.device for tensor in model.state_dict().values()} == {execution_device}
    with torch.no_grad():
        assert torch.equal(model(x.to(execution_device)).cpu(), expected)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("device_map", [{"": "disk"}, {"linear1": "disk", "batchnorm": "disk", "linear2": "disk"}])
def test_everything_on_disk(checkpoint, tmp_path, device_map, offload_buffers):
    path, x, expected = checkpoint
    model = load_checkpoint_and_dispatch(
        empty(), path, device_map=device_map, offload_folder=tmp_path / "offload", offload_buffers=offload_buffers
    )
    assert model.hf_device_map == device_map
    assert {name for name, device in devices(model).items() if device == "cpu"} == (
        set() if offload_buffers else {"batchnorm.running_mean", "batchnorm.running_var", "batchnorm.num_batches_tracked"}
    )
    assert torch.equal(model(x), expected)
    assert model.linear1.weight.device.type == "meta"


def test_nothing_is_written_for_what_stays_on_disk(checkpoint, tmp_path):
    path, x, expected = checkpoint
    before = sorted((str(file), file.stat().st_mtime_ns) for file in tmp_path.rglob("*"))
    model = load_checkpoint_and_dispatch(empty(), path, device_map={"": "disk"})
    assert torch.equal(model(x), expected)
    assert sorted((str(file), file.stat().st_mtime_ns) for file in tmp_path.rglob("*")) == before


def test_an_accelerator_cpu_and_disk(checkpoint, tmp_path, accelerators):
    (device,) = accelerators(1)
    path, x, expected = checkpoint
    device_map = {"linear1": "cpu", "batchnorm": "disk", "linear2": 0}
    model = load_checkpoint_and_dispatch(empty(), path, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    assert model.hf_device_map == device_map
    assert model.linear1.weight.device.type == "meta"
    assert model.batchnorm.weight.device.type == "meta"
    assert model.linear2.weight.device == device
    with torch.no_grad():
        for _ in range(2):
            output = model(x)
            assert torch.equal(output, expected)
            assert output.device.type == "cpu"


def test_devices_in_any_spelling(checkpoint, accelerators):
    first, second = accelerators(2)
    path, x, expected = checkpoint
    written = {"linear1": first, "batchnorm": "cpu", "linear2": "sim:1"}
    model = load_checkpoint_and_dispatch(empty(), path, device_map=written)
    assert model.hf_device_map == written
    assert model.linear1.weight.device == first
    assert model.linear2.weight.device == second
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_strategies(tmp_path, strategy, accelerators):
    accelerators(2)
    torch.manual_seed(0)
    plain = Bigger().eval()
    x = torch.randn(2, 3)
    expected = plain(x)
    torch.save(plain.state_dict(), tmp_path / "model.bin")
    model = load_checkpoint_and_dispatch(
        empty(Bigger),
        tmp_path / "model.bin",
        device_map=strategy,
        max_memory={0: 500, 1: 500, "cpu": "1MB"},
        no_split_module_classes=["ModelForTest"],
    )
    assert set(model.hf_device_map.values()) <= {0, 1, "cpu"}
    assert all(name == "" or name.split(".")[0] == "parts" for name in model.hf_device_map)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_what_does_not_fit_goes_to_disk(tmp_path):
    torch.manual_seed(0)
    plain = Bigger().eval()
    x = torch.randn(2, 3)
    torch.save(plain.state_dict(), tmp_path / "model.bin")
    model = load_checkpoint_and_dispatch(
        empty(Bigger), tmp_path / "model.bin", "auto", {"cpu": 650}, ["ModelForTest"], tmp_path / "offload"
    )
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("strategy", ["automatic", "", "sequentially"])
def test_an_unknown_strategy(checkpoint, strategy):
    path, _, _ = checkpoint
    with pytest.raises(ValueError, match="balanced_low_0"):
        load_checkpoint_and_dispatch(empty(), path, device_map=strategy)


@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16", torch.float64])
def test_dtype_is_converted_on_the_way(checkpoint, dtype, tmp_path):
    path, x, _ = checkpoint
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = load_checkpoint_and_dispatch(
        empty(), path, device_map={"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}, dtype=dtype, offload_folder=tmp_path / "o"
    )
    assert {name: tensor.dtype for name, tensor in model.named_parameters()} == dict.fromkeys(dict(model.named_parameters()), wanted)
    assert model.batchnorm.num_batches_tracked.dtype == torch.int64
    assert model(x.to(wanted)).dtype == wanted


@pytest.mark.parametrize("offload_state_dict", [None, False, True])
def test_old_arguments_change_nothing(checkpoint, tmp_path, offload_state_dict):
    path, x, expected = checkpoint
    model = load_checkpoint_and_dispatch(
        empty(),
        path,
        device_map={"linear1": "cpu", "batchnorm": "disk", "linear2": "cpu"},
        offload_folder=tmp_path / "offload",
        offload_state_dict=offload_state_dict,
        full_state_dict=False,
    )
    assert torch.equal(model(x), expected)


def test_preloaded_classes_and_skipped_keys(tmp_path, execution_device):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), ReadsItsChild()).eval()
    torch.save(plain.state_dict(), tmp_path / "model.bin")
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(3, 3), ReadsItsChild())
    load_checkpoint_and_dispatch(
        model,
        tmp_path / "model.bin",
        device_map={"0": execution_device, "1": "disk"},
        preload_module_classes=["ReadsItsChild"],
        skip_keys="past",
    )
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_forced_hooks(checkpoint):
    path, x, expected = checkpoint
    model = load_checkpoint_and_dispatch(empty(), path, device_map={"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(model(x), expected)


def test_strict_refuses_what_the_model_has_no_place_for(tmp_path):
    model, x, expected = ready()
    torch.save({**model.state_dict(), "stranger": torch.ones(1)}, tmp_path / "model.bin")
    with pytest.raises((ValueError, RuntimeError), match="stranger"):
        load_checkpoint_and_dispatch(empty(), tmp_path / "model.bin", device_map={"": "cpu"}, strict=True)
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path / "model.bin", device_map={"": "cpu"})
    assert torch.equal(loaded(x), expected)


def test_hooks_come_off_and_the_weights_are_there(checkpoint, tmp_path):
    path, x, expected = checkpoint
    model = load_checkpoint_and_dispatch(empty(), path, device_map={"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"})
    remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert torch.equal(model.to("cpu")(x), expected)


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_checkpoint_and_dispatch(empty(), tmp_path / "nowhere", device_map={"": "cpu"})


def test_missing_tensors_are_named_before_anything_is_loaded(tmp_path):
    model, _, _ = ready()
    state = {name: value for name, value in model.state_dict().items() if name != "linear2.bias"}
    torch.save(state, tmp_path / "model.bin")
    for device_map in (None, {"": "cpu"}, "auto", {"linear1": "disk", "batchnorm": "cpu", "linear2": "cpu"}):
        target = empty()
        with pytest.raises(ValueError, match=r"linear2\.bias"):
            load_checkpoint_and_dispatch(target, tmp_path / "model.bin", device_map=device_map, offload_folder=tmp_path / "offload")
        assert target.linear1.weight.is_meta
        assert not hasattr(target, "hf_device_map")
    assert not os.path.exists(tmp_path / "offload")
