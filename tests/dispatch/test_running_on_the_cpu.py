"""Map entries of "cpu:resident": blocks that rest in RAM and run there, beside an accelerator that runs the others."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from dispatch_models import tiny
from safetensors.torch import save_file

import bigmodel
from bigmodel.dispatch import LazyTensor, dispatch, placement, undispatch
from bigmodel.errors import PlanError
from bigmodel.machine import Rate
from bigmodel.planning.hardware import named_machine

MIXED = {"embed": 0, "layers.0": 0, "layers.1": "cpu:resident", "layers.2": "cpu", "layers.3": "cpu:resident", "norm": 0, "head": 0}


def test_blocks_run_where_they_rest(accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny(tie=False)
    seen: dict[str, torch.device] = {}
    for name, layer in model.layers.named_children():
        layer.norm.register_forward_hook(lambda module, args, output, name=name: seen.update({name: output.device}))
    torch.sim.reset_link_stats()
    bigmodel.dispatch_model(model, {**MIXED, "scale": 0, "shift": 0})
    with torch.no_grad():
        assert torch.equal(model(ids).cpu(), expected)
    cpu = torch.device("cpu")
    assert seen == {"0": device, "1": cpu, "2": device, "3": cpu}
    assert model.hf_device_map == {**MIXED, "scale": 0, "shift": 0}
    row = placement(model)["layers.1.up"]
    assert (row.rests, row.runs, row.counters) == ("cpu", "cpu", None)
    assert placement(model)["layers.2"].runs == str(device)


def test_activations_travel_and_weights_do_not(accelerators):
    accelerators(1)
    model, ids, expected = tiny(tie=False, width=64)
    device_map = {"": 0, "layers": "cpu:resident"}
    bigmodel.dispatch_model(model, device_map)
    torch.sim.reset_link_stats()
    with torch.no_grad():
        assert torch.equal(model(ids).cpu(), expected)
    activation_bytes = ids.numel() * 64 * 4
    stats = torch.sim.link_stats(0)
    assert stats["h2d"]["bytes"] <= activation_bytes + ids.numel() * 8 + 512
    assert placement(model).bytes_moved == 0


def test_a_checkpoint_is_loaded_where_the_map_says(tmp_path, accelerators):
    (device,) = accelerators(1)
    model, ids, expected = tiny(tie=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with bigmodel.init_empty_weights(include_buffers=False):
        empty = type(model)(tie=False).eval()
    empty.shift.copy_(model.shift)
    loaded = bigmodel.load_checkpoint_and_dispatch(empty, tmp_path / "model.safetensors", device_map={**MIXED, "layers.2": "disk", "": 0})
    with torch.no_grad():
        assert torch.equal(loaded(ids).cpu(), expected)
    assert loaded.layers[1].up.weight.device.type == "cpu"
    assert not isinstance(loaded.layers[1].up.weight, LazyTensor)
    assert isinstance(loaded.layers[2].up.weight, LazyTensor)
    assert loaded.layers[0].up.weight.device == device


def test_a_plan_that_chose_it_is_kept_to(accelerators):
    """Behind a link of 10 bytes a second every weight is better left where it is."""
    accelerators(1)
    model, ids, expected = tiny(tie=False, width=32)
    block_bytes = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    machine = named_machine({0: "T4"}, None)
    machine = replace(machine, devices={**machine.devices, 0: replace(machine.devices[0], from_host=Rate(10, "measured"))})
    made = bigmodel.plan(model, {0: 3 * block_bytes, "cpu": "1GiB"}, machine=machine, execution="auto", no_split_module_classes=["Block"])
    assert "cpu:resident" in made.device_map.values()
    bigmodel.dispatch_model(model, made.device_map)
    with torch.no_grad():
        assert torch.equal(model(ids).cpu(), expected)
    assert placement(model).bytes_moved <= made.moved_bytes + 20 * 32 * 4  # and rows of an embedding


def test_gradients_flow_through_all_devices(accelerators):
    accelerators(1)
    model, ids, _ = tiny(tie=False)
    plain = copy.deepcopy(model)
    for parameter in plain.layers[2].parameters():
        parameter.requires_grad_(False)  # offloaded weights are frozen
    plain(ids).sum().backward()
    bigmodel.dispatch_model(model, {**MIXED, "": 0})
    model(ids).sum().backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, LazyTensor):
            assert torch.equal(parameter.grad.cpu(), wanted[name].grad), name


def test_without_an_accelerator_it_is_the_cpu():
    model, ids, expected = tiny()
    bigmodel.dispatch_model(model, {"": "cpu:resident"})
    assert not hasattr(model, "_hf_hook")
    with torch.no_grad():
        assert torch.equal(model(ids), expected)
    model = dispatch(model, {"": "cpu", "layers": "cpu:resident"}, main_device=torch.device("cpu"), force_hooks=True)
    with torch.no_grad():
        assert torch.equal(model(ids), expected)
    assert not any(isinstance(parameter, LazyTensor) for parameter in undispatch(model).parameters())


def test_it_is_no_budget():
    with pytest.raises(PlanError, match="cpu:resident"):
        bigmodel.plan(tiny()[0], {"cpu:resident": 100})
