"""Adapters beside offloaded layers, put where a weight says that it is, as libraries do."""

from __future__ import annotations

import threading

import pytest
import torch
from dispatch_models import FileStore, tiny
from torch import nn

from bigmodel import dispatch_model, execution_devices
from bigmodel.dispatch import dispatch
from bigmodel.errors import DispatchError


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False).to(base.weight.device)
        self.up = nn.Linear(2, base.out_features, bias=False).to(base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.layers:
        layer.down = LowRank(layer.down)
    return model


def offloaded(tmp_path, device) -> tuple[nn.Module, torch.Tensor]:
    model, ids, _ = tiny()
    return dispatch(model, {"": "disk"}, main_device=device, store=FileStore(tmp_path, model.state_dict())), ids


def test_adapters_land_where_their_layers_run(tmp_path, execution_device):
    model, ids = offloaded(tmp_path, execution_device)
    with execution_devices():
        with_adapters(model)
        assert model.layers[0].down.base.weight.device == execution_device
    assert model.layers[0].down.base.weight.device.type == "meta"
    plain = with_adapters(tiny()[0])
    output, expected = model(ids), plain(ids)
    assert torch.equal(output.cpu(), expected)
    output.sum().backward()
    expected.sum().backward()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            found = model.get_parameter(name)
            assert found.device == execution_device
            assert torch.equal(found.grad.cpu(), parameter.grad), name


def test_adapters_without_values_are_refused_by_name(tmp_path, execution_device):
    model, ids = offloaded(tmp_path, execution_device)
    with_adapters(model)
    with pytest.raises(DispatchError, match=r"down\.down\.weight .*execution_devices\(\)"):
        model(ids)


def test_the_map_tells_where_adapters_are_loaded_to(tmp_path, execution_device):
    """transformers fills adapters by the places in the model's map, and nothing of what is on "disk"."""
    model, *_ = tiny()
    home = "cpu" if execution_device.type == "cpu" else execution_device.index
    device_map = {"": home, "layers.0": "disk", "layers.1": "cpu"}
    dispatch_model(model, device_map, main_device=execution_device, offload_dir=tmp_path)
    assert model.hf_device_map == device_map
    with execution_devices():
        assert model.hf_device_map == {
            "": execution_device if home == "cpu" else home,
            "layers.0": execution_device,
            "layers.1": execution_device,
        }
    assert model.hf_device_map == device_map
    model.hf_device_map = {"": "disk"}
    assert model.hf_device_map == {"": "disk"}
    del model.hf_device_map
    assert not hasattr(model, "hf_device_map")


def test_other_threads_see_meta(tmp_path, execution_device):
    model, _ = offloaded(tmp_path, execution_device)
    seen: list[str] = []
    with execution_devices():
        thread = threading.Thread(target=lambda: seen.append(model.head.weight.device.type))
        thread.start()
        thread.join()
    assert seen == ["meta"]
