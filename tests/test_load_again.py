"""A checkpoint that is loaded into a model which has offloaded weights of another one: the new values arrive, whatever the maps are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.errors import CheckpointError, DispatchError, MatchError
from bigmodel.utils import load_checkpoint_in_model, set_module_tensor_to_device

DISK, PARTLY, HALF, CPU = {"": "disk"}, {"": "cpu", "1": "disk"}, {"": "cpu", "0": "disk", "1": "disk"}, {"": "cpu"}
MAPS: list[dict[str, Any]] = [DISK, PARTLY, HALF, CPU]
X = torch.ones(1, 1)


def net(value: float, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False, dtype=dtype) for _ in range(4)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model.requires_grad_(False)


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(net(1.0).state_dict(), "one.safetensors")
    save_file(net(2.0).state_dict(), "two.safetensors")


def dispatched(device_map: Any) -> nn.Module:
    with bigmodel.init_empty_weights():
        model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(4)])
    return bigmodel.load_checkpoint_and_dispatch(model, "one.safetensors", device_map=device_map)


def values(model: nn.Module) -> list[float]:
    return [float(value) for value in model.state_dict().values()]


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", [*MAPS, None])
@pytest.mark.parametrize("has_run", [False, True])
def test_dispatched_again(first: Any, second: Any, has_run: bool) -> None:
    model = dispatched(first)
    if has_run:
        assert model(X).item() == 1.0
    bigmodel.load_checkpoint_and_dispatch(model, "two.safetensors", device_map=second)
    assert model(X).item() == 16.0
    assert values(model) == [2.0] * 4
    assert values(bigmodel.undispatch(model)) == [2.0] * 4


@pytest.mark.parametrize(
    ("first", "second"), [(DISK, None), (DISK, CPU), (DISK, DISK), (DISK, PARTLY), (PARTLY, None), (PARTLY, CPU), (PARTLY, PARTLY)]
)
def test_loaded_into_a_dispatched_model(first: Any, second: Any, tmp_path: Path) -> None:
    model = dispatched(first)
    model(X)
    load_checkpoint_in_model(model, "two.safetensors", device_map=second, offload_folder=tmp_path / "offload")
    assert model(X).item() == 16.0
    assert values(model) == [2.0] * 4
    if second is not None:
        rests = {row.name: row.rests for row in bigmodel.placement(model).rows if row.counters is not None}
        assert all(kind == ("disk" if second.get(name, second.get("")) == "disk" else "cpu") for name, kind in rests.items())


def test_what_rested_on_disk_is_left_in_the_new_checkpoint() -> None:
    model = dispatched(DISK)
    load_checkpoint_in_model(model, "two.safetensors")
    assert bigmodel.placement(model)["0"].rests == "disk"


def test_after_cpu_offload() -> None:
    for second in (CPU, DISK, None):
        model = bigmodel.cpu_offload(net(1.0))
        bigmodel.load_checkpoint_and_dispatch(model, "two.safetensors", device_map=second)
        assert model(X).item() == 16.0


def test_another_dtype_arrives() -> None:
    model = dispatched(DISK)
    load_checkpoint_in_model(model, "two.safetensors", dtype="bfloat16")
    assert model[0].weight.dtype == torch.bfloat16
    assert model(X.bfloat16()).item() == 16.0


def test_a_failed_load_leaves_the_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({name: value for name, value in net(2.0).state_dict().items() if name != "3.weight"}, "short.safetensors")

    def fails(*_: Any) -> None:
        raise CheckpointError("no")

    for first in (DISK, HALF):
        for second in (None, CPU, PARTLY):
            model = dispatched(first)
            with pytest.raises(MatchError, match=r"3\.weight"):
                bigmodel.load_checkpoint_and_dispatch(model, "short.safetensors", device_map=second)
            with monkeypatch.context() as patch:
                patch.setattr(sys.modules["bigmodel.loading.materialize"], "set_extra_states", fails)
                with pytest.raises(CheckpointError, match="no"):
                    bigmodel.load_checkpoint_and_dispatch(model, "two.safetensors", device_map=second)
            assert model(X).item() == 1.0
            assert values(model) == [1.0] * 4


@pytest.mark.parametrize("first", [DISK, PARTLY])
def test_one_tensor_is_set(first: Any) -> None:
    model = dispatched(first)
    model(X)
    set_module_tensor_to_device(model, "1.weight", "cpu", torch.full((1, 1), 5.0))
    assert model(X).item() == 5.0
    assert model[1].weight.item() == 5.0
    with pytest.raises(ValueError, match="shape"):
        set_module_tensor_to_device(model, "1.weight", "cpu", torch.ones(2, 2))


def test_ties_stay_ties() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    for file, value in (("one", 1.0), ("two", 2.0)):
        save_file({"0.weight": torch.full((2, 2), value)}, f"tied-{file}.safetensors")
    for second in (None, CPU, DISK, {"0": "cpu", "1": "disk"}):
        model = bigmodel.load_checkpoint_and_dispatch(tied(), "tied-one.safetensors", device_map=DISK)
        bigmodel.load_checkpoint_and_dispatch(model, "tied-two.safetensors", device_map=second)
        with torch.no_grad():
            assert model(torch.ones(2)).tolist() == [16.0, 16.0]
        assert model[0].weight is model[1].weight


def test_packing_needs_a_map() -> None:
    model = dispatched(DISK)
    with pytest.raises(DispatchError, match="device_map"):
        bigmodel.load_checkpoint_and_dispatch(model, "two.safetensors", quantization="fp8")
    assert model(X).item() == 1.0
