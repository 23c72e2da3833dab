"""Stacked experts in MXFP4 fill floating models with the values that they mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import MatchError
from bigmodel.loading import Checkpoint, load, match, transfer

EXPERTS, ROWS, BLOCKS = 3, 40, 2
SHAPE = (EXPERTS, 32 * BLOCKS, ROWS)


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "experts.up_blocks": torch.randint(0, 256, (EXPERTS, ROWS, BLOCKS, 16), generator=generator, dtype=torch.uint8),
        "experts.up_scales": torch.randint(0, 255, (EXPERTS, ROWS, BLOCKS), generator=generator, dtype=torch.uint8),
    }


def meaning(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Value by value, in double precision: sign, two bits of exponent, one of mantissa; times a power of two."""
    blocks, exponents = state["experts.up_blocks"], state["experts.up_scales"]
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).to(torch.int64)
    exponent, mantissa = (halves >> 1) & 3, (halves & 1).double()
    size = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1).double())
    signed = torch.where(halves >= 8, -size, size)
    return (signed * 2.0 ** (exponents.double() - 127)[..., None]).flatten(-2).transpose(1, 2)


def stack(dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.up = nn.Parameter(torch.empty(SHAPE, dtype=dtype, device="meta"), requires_grad=False)
    return model


@pytest.mark.parametrize("unpacked_bytes", [1, 900, 4 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, unpacked_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "UNPACKED_BYTES", unpacked_bytes)
    state = packed()
    save_file(state, tmp_path / "model.safetensors")
    model = stack(dtype)
    report = load(model, Checkpoint.open(tmp_path), strict=True)
    assert torch.equal(model.experts.up, meaning(state).to(torch.float32).to(dtype))
    assert torch.equal(model.experts.up.signbit(), meaning(state).signbit())
    assert report.bytes_read == sum(value.nbytes for value in state.values())


def test_the_disk_tier_gives_single_experts(tmp_path: Path) -> None:
    state = packed()
    save_file(state, tmp_path / "model.safetensors")
    report = load(stack(torch.float32), Checkpoint.open(tmp_path), {"": "disk"})
    found = torch.empty(1, *SHAPE[1:])
    report.store.read_rows("experts.up", torch.tensor([1]), found)
    assert torch.equal(found[0], meaning(state)[1].float())


def test_a_model_that_has_the_packed_tensors_gets_them_as_they_are(tmp_path: Path) -> None:
    state = packed()
    save_file(state, tmp_path / "model.safetensors")
    model = nn.Module()
    model.experts = nn.Module()
    for name, value in state.items():
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        model.experts.register_parameter(name.removeprefix("experts."), nn.Parameter(empty, requires_grad=False))
    load(model, Checkpoint.open(tmp_path), strict=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize("change", [lambda scales: scales[:, :-1], lambda scales: scales.float(), lambda scales: None])
def test_what_is_no_such_pair_is_refused_by_name(tmp_path: Path, change) -> None:
    state = packed()
    scales = change(state.pop("experts.up_scales"))
    save_file(state | ({} if scales is None else {"experts.up_scales": scales.contiguous()}), tmp_path / "model.safetensors")
    with pytest.raises(MatchError, match=r"experts\.up \(experts\.up_blocks is packed in a way that bigmodel does not read"):
        load(stack(torch.float32), Checkpoint.open(tmp_path))


def test_values_that_are_there_as_they_are_come_first(tmp_path: Path) -> None:
    values = torch.randn(SHAPE)
    save_file(packed() | {"experts.up": values}, tmp_path / "model.safetensors")
    model = stack(torch.float32)
    load(model, Checkpoint.open(tmp_path))
    assert torch.equal(model.experts.up, values)
    assert set(match(model, Checkpoint.open(tmp_path)).unexpected) == {"experts.up_blocks", "experts.up_scales"}
