"""A configuration beside packed weights that tells of others is refused, naming what both say; a silent one changes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel import load_checkpoint_and_dispatch
from bigmodel.errors import CheckpointError

State = dict[str, torch.Tensor]
ROWS, COLUMNS = 32, 256


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def gptq(bits: int, group: int, zero: int | None = None) -> State:
    """A layer of GPTQ with zeros stored less 1; all of them `zero`, where that is given (4 bits)."""
    groups = COLUMNS // group
    stored = words(groups, ROWS * bits // 32)
    if zero is not None:
        stored = torch.full((groups, ROWS // 8), (zero - 1) * 0x11111111, dtype=torch.int32)
    state = {"qweight": words(COLUMNS * bits // 32, ROWS), "qzeros": stored, "scales": torch.ones(groups, ROWS).half()}
    return {f"layer.{name}": value for name, value in state.items()} | {"layer.g_idx": (torch.arange(COLUMNS) // group).int()}


def awq(group: int) -> State:
    groups = COLUMNS // group
    state = {"qweight": words(COLUMNS, ROWS // 8), "qzeros": words(groups, ROWS // 8), "scales": torch.ones(groups, ROWS).half()}
    return {f"layer.{name}": value for name, value in state.items()}


def compressed(group: int) -> State:
    state = {
        "packed": words(ROWS, COLUMNS // 8),
        "scale": torch.ones(ROWS, COLUMNS // group).bfloat16(),
        "shape": torch.tensor([ROWS, COLUMNS]),
    }
    return {f"layer.weight_{name}": value for name, value in state.items()}


def fp8(*blocks: int) -> State:
    scale = torch.arange(1.0, 1 + (ROWS // blocks[0]) * (COLUMNS // blocks[1])).view(ROWS // blocks[0], COLUMNS // blocks[1])
    return {"layer.weight": torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn), "layer.weight_scale_inv": scale}


def loaded(folder: Path, state: State, described: object, place: str = "config.json") -> torch.Tensor:
    save_file(state, folder / "model.safetensors")
    (folder / place).write_text(json.dumps(described if place == "quantize_config.json" else {"quantization_config": described}))
    model = nn.ModuleDict({"layer": nn.Linear(COLUMNS, ROWS, bias=False, device="meta")}).requires_grad_(False)
    load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    return model["layer"].weight


def groups_of(*weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {f"group_{number}": {"weights": each} for number, each in enumerate(weights)},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
CONTRADICTIONS: dict[str, tuple[State, dict[str, Any], str]] = {
    "bits": (
        gptq(8, 128),
        GPTQ,
        "says 4 bits, but 'layer.qweight' of shape [64, 32] in model.safetensors holds 8-bit integers for 256 columns",
    ),
    "group size": (
        gptq(4, 64, 8),
        GPTQ,
        "says a group size of 128, which makes 2 of 256 columns, but 'layer.scales' of shape [4, 32] in model.safetensors is for 4 groups "
        "(of 64)",
    ),
    "one group": (
        gptq(4, 64, 8),
        GPTQ | {"group_size": -1},
        "says one group for a whole row, which makes 1 of 256 columns, but 'layer.scales'",
    ),
    "zeros": (gptq(4, 128, 7), GPTQ, "(sym), so that all zeros are 8, but those of 'layer.qzeros' in model.safetensors go from 7 to 7"),
    "format of zeros": (
        gptq(4, 128, 8),
        GPTQ | {"checkpoint_format": "gptq_v2"},
        "(sym), so that all zeros are 8, but those of 'layer.qzeros' in model.safetensors go from 7 to 7",
    ),
    "method": (
        gptq(4, 128, 8),
        GPTQ | {"quant_method": "awq"},
        "says quant_method 'awq', but 'layer.qweight' in model.safetensors is packed as 'gptq'",
    ),
    "awq, bits": (
        awq(128),
        {"quant_method": "awq", "bits": 8},
        "says 8 bits, but 'layer.qweight' of shape [256, 4] in model.safetensors holds 4-bit",
    ),
    "awq, group size": (awq(64), {"quant_method": "awq", "bits": 4, "group_size": 128}, "says a group size of 128"),
    "compressed-tensors, group size": (
        compressed(32),
        groups_of({"num_bits": 4, "strategy": "group", "group_size": 128}),
        "says a group size of 128, which makes 2 of 256 columns, but 'layer.weight_scale' of shape [32, 8]",
    ),
    "compressed-tensors, rows": (compressed(32), groups_of({"num_bits": 4, "strategy": "channel"}), "says one group for a whole row"),
    "compressed-tensors, bits": (compressed(32), groups_of({"num_bits": 8}), "says 8 bits, but 'layer.weight_packed'"),
    "fp8, blocks": (
        fp8(16, 64),
        {"quant_method": "fp8", "weight_block_size": [16, 128]},
        "says that blocks of [16, 128] share a scale, of which 'layer.weight' of shape [32, 256] in model.safetensors has [2, 2] a matrix, "
        "but 'layer.weight_scale_inv' has the shape [2, 4]",
    ),
    "fp8, one scale": (
        fp8(ROWS, COLUMNS),
        {"quant_method": "fp8", "weight_block_size": [16, 128]},
        "but 'layer.weight_scale_inv' has the shape [1, 1]",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_the_tensors_is_refused_with_both_values(tmp_path: Path, case: str) -> None:
    state, described, says = CONTRADICTIONS[case]
    with pytest.raises(CheckpointError, match=re.escape(says)) as error:
        loaded(tmp_path, state, described)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_every_configuration_is_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    with pytest.raises(CheckpointError, match="says 4 bits"):
        loaded(tmp_path, gptq(8, 128), {"bits": 8}, "quantize_config.json")
    with pytest.raises(CheckpointError, match=r"quantize_config\.json: says 8 bits"):
        loaded(tmp_path, gptq(4, 128, 8), {"bits": 8}, "quantize_config.json")


@pytest.mark.parametrize(
    ("state", "described"),
    [
        (gptq(4, 128, 8), GPTQ),
        (gptq(4, 128), GPTQ | {"sym": False}),
        (gptq(4, COLUMNS, 8), GPTQ | {"group_size": -1}),
        (gptq(4, 128, 8), {"bits": "four", "group_size": None}),
        (gptq(8, 64), GPTQ | {"sym": None, "dynamic": {"layer": {"bits": 8, "group_size": 64}}}),
        (gptq(8, 64), {"quant_method": "auto-round", "bits": 4, "group_size": 128}),
        (awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64}),
        (compressed(32), groups_of({"num_bits": 4, "strategy": "group", "group_size": 32})),
        (compressed(COLUMNS), groups_of({"num_bits": 4, "strategy": "channel", "group_size": None})),
        (compressed(32), groups_of({"num_bits": 4, "group_size": 128}, {"num_bits": 4, "group_size": 32})),
        (fp8(16, 128), {"quant_method": "fp8", "weight_block_size": [16, 128]}),
        (fp8(ROWS, COLUMNS), {"quant_method": "fp8", "weight_block_size": None}),
        (fp8(16, 64), {"quant_method": "fp8", "weight_block_size": "none"}),
    ],
)
def test_what_agrees_or_is_not_said_changes_nothing(tmp_path: Path, state: State, described: dict[str, Any]) -> None:
    found = loaded(tmp_path, state, described)
    (tmp_path / "bare").mkdir()
    if state.get("layer.qzeros") is None or described.get("sym"):
        assert torch.equal(found, loaded(tmp_path / "bare", state, {}))
    assert found.isfinite().all()


def test_blocks_that_shapes_leave_open_are_those_that_the_configuration_says(tmp_path: Path) -> None:
    weight, scale = torch.ones(192, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file({"weight": weight, "weight_scale_inv": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [96, 128]}}))
    model = nn.Linear(256, 192, bias=False, device="meta").requires_grad_(False)
    load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
    assert torch.equal(model.weight, scale.repeat_interleave(96, 0).repeat_interleave(128, 1))
