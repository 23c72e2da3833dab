"""A plan handed to a loader: taken at its word where it is one of this model, loaded like this, and refused by name where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.errors import PlanError
from bigmodel.placing import find_placing
from bigmodel.quantization import BnbQuantizationConfig


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Model(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def empty(**sizes: int) -> Model:
    with bigmodel.init_empty_weights():
        return Model(**sizes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_ring_buffers_and_main_device_are_those_of_the_plan(file: Path, accelerators) -> None:
    accelerators(2)
    made = replace(bigmodel.plan(empty(), {0: "1KB", 1: "40KB", "cpu": "1GB"}), offload_buffers=True)
    assert made.main_device == 1
    place = find_placing(empty(), made)
    assert place.device_map == made.device_map
    assert (place.main_device.index, place.ring_bytes, place.offload_buffers) == (1, made.reserve_bytes, True)
    model = bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=made)
    x = torch.randn(2, 32)
    plain = bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map={"": "cpu"})
    with torch.no_grad():
        assert torch.allclose(model(x).cpu(), plain(x), atol=1e-5)


def test_a_plan_that_was_kept_as_text_works_like_the_plan(file: Path) -> None:
    made = bigmodel.plan(empty(), {"cpu": "60KB"})
    again = bigmodel.Plan.from_json(made.to_json())
    model = bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=again)
    assert model.hf_device_map == made.device_map
    assert set(made.device_map.values()) == {"cpu", "disk"}


def test_a_plan_of_another_model_is_refused_by_name(file: Path) -> None:
    made = bigmodel.plan(empty(blocks=8), {"cpu": "60KB"})
    with pytest.raises(PlanError, match=r"made for Model: Model has no 'blocks\.6'"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=made)
    shorter = bigmodel.plan(empty(blocks=4), {"cpu": "60KB"})
    with pytest.raises(PlanError, match=r"it has no place for 'blocks\.4\.up\.weight'"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=shorter)
    with bigmodel.init_empty_weights():
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="This plan is for Sequential of 160 bytes"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=bigmodel.plan(other, {"cpu": 150}))


def test_a_plan_of_a_smaller_model_or_dtype_is_refused_with_both_sizes(file: Path) -> None:
    smaller = bigmodel.plan(empty(width=16), {"cpu": "1GB"})
    total = sum(tensor.nbytes for tensor in (*Model().parameters(), *Model().buffers()))
    with pytest.raises(PlanError, match=rf"is for Model of {smaller.total_bytes:,} bytes, and loading this Model takes {total:,}"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=smaller)
    half = bigmodel.plan(empty(), {"cpu": "1GB"}, dtype="float16")
    with pytest.raises(PlanError, match="with the dtype that it is loaded in"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=half)
    assert bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=half, dtype="float16").head.weight.dtype == torch.float16


def test_a_plan_of_packed_weights_is_not_loaded_unpacked(file: Path) -> None:
    made = bigmodel.plan(empty(), {"cpu": "1GB"}, dtype="int8")
    with pytest.raises(PlanError, match="packed as int8, and loading this Model takes"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=made)


def test_a_plan_for_devices_that_are_not_here_is_refused(file: Path) -> None:
    made = bigmodel.plan(empty(), {0: "1GB"})
    with pytest.raises(PlanError, match="torch sees no accelerator"):
        bigmodel.load_checkpoint_and_dispatch(empty(), file, device_map=made)


@pytest.mark.parametrize(("planned", "config"), [("float32", {"torch_dtype": torch.float32}), ("float16", {})])
def test_a_plan_of_packed_weights_is_loaded_packed_to_the_byte(file: Path, planned: str, config: dict[str, object]) -> None:
    save_file(Model(width=64).state_dict(), file)
    made = bigmodel.plan(empty(width=64), {"cpu": "1GB"}, dtype=planned, weight_format="int8")
    quantization = BnbQuantizationConfig(load_in_8bit=True, **config)
    model = bigmodel.load_checkpoint_and_dispatch(empty(width=64), file, device_map=made, quantization=quantization)
    assert sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) == made.total_bytes
