"""Scales that are NaN or infinite are an error that names them, wherever they are applied."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, load, transfer
from bigmodel.loading.finite import refuse_not_finite

State = dict[str, torch.Tensor]
ROWS, COLUMNS, GROUPS = 16, 64, 2


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def eight_bits(dtype: torch.dtype, scale: torch.Tensor) -> State:
    return {"layer.weight": torch.ones(ROWS, COLUMNS).to(dtype), "layer.weight_scale": scale}


def gptq(order: torch.Tensor) -> State:
    state = {"qweight": words(COLUMNS // 8, ROWS), "qzeros": torch.full((GROUPS, ROWS // 8), 0x77777777, dtype=torch.int32)}
    state |= {"scales": torch.ones(GROUPS, ROWS).half(), "g_idx": order.to(torch.int32)}
    return {f"layer.{name}": value for name, value in state.items()}


def awq() -> State:
    state = {"qweight": words(COLUMNS, ROWS // 8), "qzeros": words(GROUPS, ROWS // 8), "scales": torch.ones(GROUPS, ROWS).half()}
    return {f"layer.{name}": value for name, value in state.items()}


def compressed() -> State:
    state = {"packed": words(ROWS, COLUMNS // 8), "scale": torch.ones(ROWS, GROUPS).bfloat16(), "shape": torch.tensor([ROWS, COLUMNS])}
    return {f"layer.weight_{name}": value for name, value in state.items()}


CASES: dict[str, tuple[str, Callable[[], State]]] = {
    "int8, rows": ("layer.weight_scale", lambda: eight_bits(torch.int8, torch.ones(ROWS, 1))),
    "fp8, one": ("layer.weight_scale", lambda: eight_bits(torch.float8_e4m3fn, torch.tensor(1.0))),
    "fp8, blocks": ("layer.weight_scale", lambda: eight_bits(torch.float8_e4m3fn, torch.ones(4, 4).bfloat16())),
    "gptq": ("layer.scales", lambda: gptq(torch.arange(COLUMNS) // (COLUMNS // GROUPS))),
    "gptq, reordered": ("layer.scales", lambda: gptq(torch.arange(COLUMNS) * 7 % COLUMNS % GROUPS)),
    "awq": ("layer.scales", awq),
    "compressed": ("layer.weight_scale", compressed),
}


@pytest.mark.parametrize("unpacked_bytes", [1, 4 << 20])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", CASES)
def test_a_scale_that_is_no_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, wrong: float, unpacked_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "UNPACKED_BYTES", unpacked_bytes)
    name, make = CASES[case]
    state = make()
    save_file(state, tmp_path / "model.safetensors")

    def empty() -> nn.Module:
        return nn.ModuleDict({"layer": nn.Linear(COLUMNS, ROWS, bias=False, device="meta")}).requires_grad_(False)

    good = empty()
    load(good, Checkpoint.open(tmp_path), strict=True)
    assert good["layer"].weight.isfinite().all()
    state[name].view(-1)[-1] = wrong
    save_file(state, tmp_path / "model.safetensors")
    model = empty()
    count = r"\d+ of the \d+ scales" if unpacked_bytes == 1 else f"1 of the {state[name].numel()} scales"
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: '{re.escape(name)}': {count} that were read are NaN or infinite"):
        load(model, Checkpoint.open(tmp_path))
    assert model["layer"].weight.is_meta
    store = load(model, Checkpoint.open(tmp_path), {"": "disk"}).store
    assert store is not None
    with pytest.raises(CheckpointError, match=re.escape(name)):
        store.read_rows("layer.weight", torch.tensor([ROWS - 1]), torch.empty(1, COLUMNS))


def test_exponents_of_mxfp4_that_stand_for_nan_are_named(tmp_path: Path) -> None:
    scales = torch.full((2, 3, 2), 120, dtype=torch.uint8)
    scales[1, 2, 1] = scales[0, 0, 0] = 255
    save_file({"up_blocks": torch.zeros(2, 3, 2, 16, dtype=torch.uint8), "up_scales": scales}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.up = nn.Parameter(torch.empty(2, 64, 3, device="meta"), requires_grad=False)
    with pytest.raises(CheckpointError, match="'up_scales': 1 of the 6 scales"):
        load(model, Checkpoint.open(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_scales_are_numbers(dtype: torch.dtype) -> None:
    refuse_not_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype), "s", Path("x"))
    refuse_not_finite(torch.empty(0, dtype=dtype), "s", Path("x"))
    refuse_not_finite(torch.full((3,), 254, dtype=torch.uint8).view(torch.float8_e8m0fnu), "s", Path("x"))
