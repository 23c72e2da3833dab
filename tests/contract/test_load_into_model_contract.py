"""Behaviour §2, loading: `load_state_dict`, `load_checkpoint_in_model`, and state dicts of offloaded models."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from contract_models import Tied, copy_of, devices, ready
from model_for_test import ModelForTest
from safetensors.torch import save_file
from torch import nn

from bigmodel import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_in_model
from bigmodel.hooks import AlignDevicesHook, CpuOffload, add_hook_to_module
from bigmodel.utils import align_module_device, has_offloaded_params, load_offloaded_weights, load_state_dict, offload_state_dict
from bigmodel.utils.modeling import get_state_dict_from_offload, get_state_dict_offloaded_model


def empty(kind=ModelForTest):
    with init_empty_weights():
        return kind().eval()


def same(state, expected):
    return sorted(state) == sorted(expected) and all(torch.equal(state[name].cpu(), expected[name]) for name in expected)


# --- load_state_dict ---


def test_files_of_torch_and_safetensors(tmp_path):
    state = ready()[0].state_dict()
    torch.save(state, tmp_path / "model.bin")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("model.bin", "model.safetensors"):
        for path in (tmp_path / name, str(tmp_path / name)):
            for device_map in (None, {"": "cpu"}, {"": "disk"}, {"linear1": "disk", "batchnorm": "cpu"}):
                assert same(load_state_dict(path, device_map=device_map), state)


def test_code_in_a_file_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"a": Harmful()}, tmp_path / "model.bin")
    with pytest.raises(Exception, match=r"(?i)weights"):
        load_state_dict(tmp_path / "model.bin")


def test_each_tensor_goes_to_its_device(tmp_path, accelerators):
    first, second = accelerators(2)
    save_file({"a.1.w": torch.ones(2), "a.10.w": torch.ones(3), "b": torch.ones(4)}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    state = load_state_dict(tmp_path / "m.safetensors", device_map={"a.1": 0, "a.10": "sim:1", "b": "disk"})
    assert {name: tensor.device for name, tensor in state.items()} == {"a.1.w": first, "a.10.w": second, "b": torch.device("cpu")}
    state = load_state_dict(tmp_path / "m.safetensors", device_map={"": 1})
    assert {tensor.device for tensor in state.values()} == {second}


def test_the_framework_of_a_file(tmp_path, caplog):
    file = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(1)}, file)
    with caplog.at_level(logging.WARNING):
        assert same(load_state_dict(file), {"a": torch.ones(1)})
    assert len(caplog.records) == 1
    assert "metadata" in caplog.text
    for framework, error in (("numpy", OSError), ("tf", ValueError), ("flax", ValueError)):
        save_file({"a": torch.ones(1)}, file, metadata={"format": framework})
        with pytest.raises(error, match=framework):
            load_state_dict(file)


# --- load_checkpoint_in_model ---


@pytest.fixture
def saved(tmp_path):
    """A checkpoint folder, the model's input and its output."""
    model, x, expected = ready()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder, x, expected


@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, {"": torch.device("cpu")}, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"}]
)
def test_onto_the_cpu(saved, device_map):
    folder, x, expected = saved
    for model in (empty(), ModelForTest().eval()):
        assert load_checkpoint_in_model(model, folder, device_map=device_map) is None
        assert torch.equal(model(x), expected)
        assert not hasattr(model, "hf_device_map")


def test_part_of_it_to_disk_then_dispatched(saved, tmp_path):
    folder, x, expected = saved
    device_map = {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}
    model = empty()
    load_checkpoint_in_model(model, folder, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    found = devices(model)
    assert found["linear1.weight"] == "cpu"
    assert found["batchnorm.weight"] == "meta"
    assert found["batchnorm.running_mean"] == "cpu"
    assert found["linear2.weight"] == "meta"
    assert (tmp_path / "offload" / "index.json").is_file()
    dispatch_model(model, device_map, offload_dir=tmp_path / "offload")
    assert torch.equal(model(x), expected)


def test_buffers_to_disk_on_demand(saved, tmp_path):
    folder, x, expected = saved
    device_map = {"linear1": "cpu", "batchnorm": "disk", "linear2": "cpu"}
    model = empty()
    load_checkpoint_in_model(model, folder, device_map, tmp_path / "offload", None, False, True)
    assert devices(model)["batchnorm.running_mean"] == "meta"
    dispatch_model(model, device_map, offload_dir=tmp_path / "offload", offload_buffers=True)
    assert torch.equal(model(x), expected)


def test_disk_needs_a_folder(saved):
    message = "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`"
    with pytest.raises(ValueError, match=message):
        load_checkpoint_in_model(empty(), saved[0], device_map={"": "disk"})


def test_an_index_alone_is_enough(tmp_path):
    model, x, expected = ready()
    state = model.state_dict()
    names = {name: f"shard{index % 3}.bin" for index, name in enumerate(state)}
    for shard in set(names.values()):
        torch.save({name: state[name] for name in state if names[name] == shard}, tmp_path / shard)
    for content in ({"weight_map": names, "metadata": {"total_size": 1}}, names):
        (tmp_path / "any.index.json").write_text(json.dumps(content))
        for path in (tmp_path, tmp_path / "any.index.json"):
            target = empty()
            load_checkpoint_in_model(target, path, device_map={"": "cpu"})
            assert torch.equal(target(x), expected)


def test_folders_without_or_with_too_many_indexes(tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder containing a `\.index\.json` file or a"):
        load_checkpoint_in_model(empty(), tmp_path, device_map={"": "cpu"})
    for name in ("a", "b"):
        (tmp_path / f"{name}.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"more than one `\.index\.json` file, delete the irrelevant ones"):
        load_checkpoint_in_model(empty(), tmp_path, device_map={"": "cpu"})
    with pytest.raises(ValueError, match="nowhere"):
        load_checkpoint_in_model(empty(), tmp_path / "nowhere", device_map={"": "cpu"})


def test_a_tensor_without_a_device(saved):
    with pytest.raises(ValueError, match=r"linear2\.weight.*doesn't have any device set"):
        load_checkpoint_in_model(empty(), saved[0], device_map={"linear1": "cpu", "batchnorm": "cpu"})


@pytest.mark.parametrize("dtype", [torch.float16, "float16"])
def test_dtype_and_what_stays_in_float32(saved, dtype):
    model = empty()
    load_checkpoint_in_model(model, saved[0], device_map={"": "cpu"}, dtype=dtype, keep_in_fp32_modules=["linear2"])
    assert model.linear1.weight.dtype == torch.float16
    assert model.linear2.weight.dtype == torch.float32
    assert model.batchnorm.running_mean.dtype == torch.float16
    assert model.batchnorm.num_batches_tracked.dtype == torch.int64
    model = empty()
    load_checkpoint_in_model(model, saved[0], device_map={"": "cpu"}, dtype=torch.bfloat16, keep_in_fp32_modules=["linear2"])
    assert model.linear2.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_tensors_that_the_model_has_no_place_for(tmp_path, caplog, device_map):
    model, x, expected = ready()
    torch.save({**model.state_dict(), "stranger": torch.ones(1)}, tmp_path / "model.bin")
    target = empty()
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(target, tmp_path / "model.bin", device_map=device_map)
    (record,) = [record for record in caplog.records if "stranger" in record.getMessage()]
    assert "were not used when" in record.getMessage()
    assert "ModelForTest" in record.getMessage()
    assert record.name.startswith("bigmodel")
    assert torch.equal(target(x), expected)
    with pytest.raises((ValueError, RuntimeError), match="stranger"):
        load_checkpoint_in_model(empty(), tmp_path / "model.bin", device_map=device_map, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_several_partial_shards_are_no_fault(tmp_path, strict):
    model, x, expected = ready()
    state = model.state_dict()
    names = {name: f"{name}.bin" for name in state}
    for name, shard in names.items():
        torch.save({name: state[name]}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    target = empty()
    load_checkpoint_in_model(target, tmp_path, device_map=None, strict=strict)
    assert torch.equal(target(x), expected)


def test_missing_tensors_are_refused_by_name(tmp_path):
    model, _, _ = ready()
    state = {name: value for name, value in model.state_dict().items() if name != "linear1.bias"}
    torch.save(state, tmp_path / "model.bin")
    target = empty()
    with pytest.raises(ValueError, match=r"linear1\.bias"):
        load_checkpoint_in_model(target, tmp_path / "model.bin", device_map={"": "cpu"})
    assert {parameter.device.type for parameter in target.parameters()} == {"meta"}


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"embed": "cpu", "middle": "cpu", "head": "cpu"}])
def test_ties_hold_after_loading(tmp_path, device_map):
    torch.manual_seed(0)
    plain = Tied()
    plain.tie_weights()
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    torch.save(state, tmp_path / "model.bin")
    model = empty(Tied)
    model.tie_weights()
    load_checkpoint_in_model(model, tmp_path / "model.bin", device_map=device_map)
    assert model.head.weight is model.embed.weight
    ids = torch.tensor([[1, 2]])
    assert torch.equal(model(ids), plain(ids))


def test_spooling_and_8_bit_flags_are_accepted(saved, tmp_path):
    folder, x, expected = saved
    model = empty()
    load_checkpoint_in_model(
        model,
        folder,
        {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"},
        offload_state_dict=True,
        offload_8bit_bnb=True,
        full_state_dict=False,
        broadcast_from_rank0=True,
    )
    assert torch.equal(model(x), expected)


def test_values_are_not_the_files_memory(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, file, metadata={"format": "pt"})
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(model, file, device_map={"": "cpu"})
    content = bytearray(file.read_bytes())
    content[-24:] = bytes(24)
    with open(file, "r+b") as stream:
        stream.write(content)
    assert torch.equal(model.weight.detach(), torch.ones(2, 2))
    assert torch.equal(model.bias.detach(), torch.ones(2))


# --- offloaded weights and state dicts ---


def test_written_weights_come_back(tmp_path):
    model, x, expected = ready()
    offload_state_dict(tmp_path, model.state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    target = empty()
    load_offloaded_weights(target, {}, tmp_path)
    load_offloaded_weights(target, None, tmp_path)
    assert target.linear1.weight.is_meta
    load_offloaded_weights(target, index, tmp_path)
    assert torch.equal(target(x), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ["cpu", "disk", "plain", "map"])
def test_state_dicts_of_offloaded_models(tmp_path, nested, way, execution_device):
    model = ready()[0]
    if nested:
        model = nn.Sequential(model, nn.Sequential(ready()[0], nn.Linear(5, 3)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if way == "cpu":
        cpu_offload(model, execution_device=execution_device)
    elif way == "disk":
        disk_offload(model, tmp_path, execution_device=execution_device, offload_buffers=True)
    elif way == "map":
        names = [name for name, _ in model.named_children()]
        places = ["disk", execution_device, "cpu"]
        dispatch_model(model, {name: places[index % 3] for index, name in enumerate(names)}, offload_dir=tmp_path)
    state = get_state_dict_offloaded_model(model)
    assert same(state, expected)
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "saved.safetensors")


def test_own_tensors_of_the_root_are_in_the_state_dict():
    class WithOwn(ModelForTest):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 2.0))

    model = WithOwn()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    cpu_offload(model)
    assert same(get_state_dict_offloaded_model(model), expected)


def test_values_written_after_the_offload_are_in_the_state_dict():
    model = cpu_offload(ready()[0])
    with torch.no_grad():
        model.linear1.bias.fill_(7)
    assert torch.equal(get_state_dict_offloaded_model(model)["linear1.bias"], torch.full((4,), 7.0))


def test_entries_that_exist_are_filled_from_the_offload(execution_device):
    model = ready()[0]
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    cpu_offload(model, execution_device=execution_device)
    state = {"linear1.weight": torch.empty(0), "other": torch.ones(1)}
    result = get_state_dict_from_offload(model.linear1, "linear1.weight", state)
    assert result is state
    assert torch.equal(state["linear1.weight"], expected["linear1.weight"])
    assert state["linear1.weight"].device.type == "cpu"
    assert sorted(state) == ["linear1.weight", "other"]
    get_state_dict_from_offload(model.linear1, "linear1.weight", state, device_to_put_offload=execution_device)
    assert state["linear1.weight"].device == execution_device


def test_offloaded_parameters_are_told():
    model = cpu_offload(ready()[0])
    assert has_offloaded_params(model.linear1)
    assert not has_offloaded_params(nn.Linear(2, 2))
    for hook in (AlignDevicesHook(execution_device="cpu"), CpuOffload()):
        assert not has_offloaded_params(add_hook_to_module(nn.Linear(2, 2), hook))
    assert has_offloaded_params(add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook(execution_device="cpu", offload=True)))


def test_modules_are_aligned_for_a_while(execution_device):
    model = ready()[0]
    expected = copy_of(model)
    cpu_offload(model)
    for argument in (execution_device, None):
        with align_module_device(model.linear1, argument):
            assert model.linear1.weight.device == (execution_device if argument else torch.device("cpu"))
            assert torch.equal(model.linear1.weight.detach().cpu(), expected.linear1.weight.detach())
            assert model.linear2.weight.device.type == "meta"
        assert model.linear1.weight.device.type == "meta"
    plain = nn.Sequential(nn.Linear(2, 2))
    plain.register_parameter("own", nn.Parameter(torch.ones(1)))
    with align_module_device(plain, "meta"):
        assert plain.own.device.type == "meta"
        assert plain[0].weight.device.type == "cpu"
    assert plain.own.device.type == "cpu"
    with align_module_device(plain):
        assert plain.own.device.type == "cpu"


def test_alignment_ends_with_an_error():
    model = cpu_offload(ready()[0])
    with pytest.raises(KeyError), align_module_device(model.linear1, "cpu"):
        raise KeyError
    assert model.linear1.weight.device.type == "meta"
