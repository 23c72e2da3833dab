"""A program that goes to another folder (`os.chdir`): relative paths mean what they meant when they were given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.utils import OffloadedWeightsLoader, offload_state_dict


def net(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, value)
    nn.init.constant_(model[2].weight, 1.0)
    return model


@pytest.fixture
def goes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def go(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)

    return go


def value(model: nn.Module) -> float:
    return model(torch.ones(1, 1)).item()


def test_offload_folders(goes_to: Callable[[str], None]) -> None:
    models = []
    for place, number in (("a", 1.0), ("b", 2.0)):
        goes_to(place)
        models.append(bigmodel.disk_offload(net(number), "off"))
    assert [value(model) for model in models] == [1.0, 2.0]
    goes_to("c")
    assert [value(model) for model in models] == [1.0, 2.0]


def test_checkpoints(goes_to: Callable[[str], None]) -> None:
    models = []
    for place, number in (("a", 1.0), ("b", 2.0)):
        goes_to(place)
        save_file(net(number).state_dict(), "model.safetensors")
        with bigmodel.init_empty_weights():
            model = net(0.0)
        models.append(bigmodel.load_checkpoint_and_dispatch(model, "model.safetensors", device_map={"": "disk"}))
    assert [value(model) for model in models] == [1.0, 2.0]
    goes_to("c")
    assert [value(model) for model in models] == [1.0, 2.0]


@pytest.mark.parametrize("has_index", [False, True])
def test_loaders(goes_to: Callable[[str], None], has_index: bool) -> None:
    goes_to("a")
    offload_state_dict("off", {"x": torch.ones(2)})
    save_file({"y": torch.ones(3)}, "y.safetensors")
    index = {"x": {"shape": [2], "dtype": "float32"}, "y": {"safetensors_file": "y.safetensors", "weight_name": "y", "dtype": "float32"}}
    loader = OffloadedWeightsLoader(save_folder="off", index=index if has_index else None)
    goes_to("b")
    assert loader["x"].tolist() == [1.0, 1.0]
    if has_index:
        assert loader["y"].tolist() == [1.0, 1.0, 1.0]


def test_a_folder_that_is_gone_is_needed_by_relative_paths_alone(goes_to: Callable[[str], None], tmp_path: Path) -> None:
    save_file(net(3.0).state_dict(), tmp_path / "model.safetensors")
    goes_to("a")
    (tmp_path / "a").rmdir()
    with bigmodel.init_empty_weights():
        model = net(0.0)
    assert value(bigmodel.load_checkpoint_and_dispatch(model, tmp_path / "model.safetensors", device_map={"": "disk"})) == 3.0
