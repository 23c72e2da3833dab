"""8-bit checkpoints fill floating models with the values that they mean, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError, MatchError
from bigmodel.loading import Checkpoint, OffloadedWeightsLoader, Renamed, into_model, load, load_checkpoint_in_model, match, transfer
from bigmodel.loading.keys import Concatenate, Source, Stack, Whole

FP8 = torch.float8_e4m3fn


def quantized(shape: tuple[int, ...], dtype: torch.dtype = FP8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


def scales(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def product(values: torch.Tensor, scale: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """Each value times the scale with its index divided by the blocks."""
    if not values.dim():
        return values.float() * scale.float()
    places = torch.meshgrid(*(torch.arange(size) // block for size, block in zip(values.shape, blocks, strict=True)), indexing="ij")
    return values.float() * scale[places].float()


def one(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))
    return model


@pytest.mark.parametrize("unpacked_bytes", [1, 3000, 4 << 20])
@pytest.mark.parametrize(
    ("shape", "scale_shape", "blocks"),
    [
        ((130, 140), (), (130, 140)),
        ((130, 140), (1,), (130, 140)),
        ((130, 140), (130,), (1, 140)),
        ((130, 140), (130, 1), (1, 140)),
        ((260, 140), (3, 2), (128, 128)),
        ((256, 128), (2, 1), (128, 128)),
        ((260, 256), (3, 2), (128, 128)),
        ((96, 64), (3, 4), (32, 16)),
        ((12, 64), (12, 2), (1, 32)),
        ((3, 130, 140), (3, 2, 2), (1, 128, 128)),
        ((3, 10, 14), (3, 1, 1), (1, 10, 14)),
        ((3, 10, 14), (3, 10), (1, 1, 14)),
        ((14,), (1,), (14,)),
        ((), (), ()),
        ((0, 5), (1,), (1, 5)),
    ],
)
def test_each_value_is_multiplied_with_the_scale_of_its_block(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    blocks: tuple[int, ...],
    unpacked_bytes: int,
) -> None:
    monkeypatch.setattr(transfer, "UNPACKED_BYTES", unpacked_bytes)
    values, scale = quantized(shape), scales(scale_shape)
    save_file({"weight": values, "weight_scale_inv": scale}, tmp_path / "model.safetensors")
    wide = scale.reshape((1,) * len(shape)) if scale.numel() == 1 else scale.reshape(scale.shape + (1,) * (len(shape) - scale.dim()))
    expected = product(values, wide, blocks)
    for dtype in (torch.float32, torch.bfloat16):
        model = one(shape, dtype)
        report = load(model, Checkpoint.open(tmp_path), strict=True)
        assert report.unexpected == ()
        assert torch.equal(model.weight, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, FP8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
def test_every_kind_of_value_and_scale(tmp_path: Path, dtype: torch.dtype, scale_dtype: torch.dtype, ending: str) -> None:
    values, scale = quantized((12, 16), dtype), scales((12, 1)).to(scale_dtype)
    torch.save({"weight": values, f"weight{ending}": scale}, tmp_path / "model.bin")
    model = one((12, 16))
    load(model, Checkpoint.open(tmp_path))
    assert torch.equal(model.weight, values.float() * scale.float())


def test_rows_are_read_from_the_disk_tier_with_their_scales(tmp_path: Path) -> None:
    values, scale = quantized((300, 140)), scales((3, 2))
    save_file({"weight": values, "weight_scale_inv": scale}, tmp_path / "model.safetensors")
    model = one((300, 140), torch.bfloat16)
    store = load(model, Checkpoint.open(tmp_path), {"": "disk"}).store
    assert store is not None
    rows = torch.tensor([299, 0, 130, 129])
    found = torch.empty(4, 140, dtype=torch.bfloat16)
    store.read_rows("weight", rows, found)
    assert torch.equal(found, product(values, scale, (128, 128)).bfloat16()[rows])


class Stacked:
    """Two experts' two projections, stacked and fused as transformers does it."""

    def sources(self, entries: object, targets: object) -> tuple[dict[str, Source], list[str]]:
        fused = tuple(Concatenate((Whole(f"experts.{number}.gate.weight"), Whole(f"experts.{number}.up.weight")), 0) for number in range(2))
        return {"weight": Stack(fused)}, []


def test_key_rules_work_on_the_values(tmp_path: Path) -> None:
    names = [f"experts.{number}.{part}.weight" for number in range(2) for part in ("gate", "up")]
    state = {name: quantized((130, 140), seed=number) for number, name in enumerate(names)}
    factors = {f"{name}_scale_inv": scales((2, 2), seed=number) for number, name in enumerate(names)}
    save_file(state | factors, tmp_path / "model.safetensors")
    model = one((2, 260, 140), torch.bfloat16)
    load(model, Checkpoint.open(tmp_path), rules=Stacked(), strict=True)
    parts = [product(state[name], factors[f"{name}_scale_inv"], (128, 128)).bfloat16() for name in names]
    assert torch.equal(model.weight, torch.stack([torch.cat(parts[:2]), torch.cat(parts[2:])]))
    renamed = one((130, 140))
    rules = Renamed(strip_prefix="experts.1.up.")
    load(renamed, Checkpoint.open(tmp_path), rules=rules)
    assert torch.equal(renamed.weight, product(state[names[3]], factors[f"{names[3]}_scale_inv"], (128, 128)))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"weight": quantized((192, 64)), "weight_scale": scales((2, 1))}, r"weight_scale of shape \[2, 1\] does not tell"),
        ({"weight": quantized((12, 64)), "weight_scale": scales((5, 1))}, r"weight_scale of shape \[5, 1\] does not tell"),
        ({"weight": quantized((12, 64)), "weight_scale": scales((12, 64, 1))}, "does not tell"),
        (
            {"weight": quantized((12, 64), torch.int8), "weight_scale": scales((12, 1)), "weight_zero_point": torch.zeros(12, 1)},
            "weight_zero_point stands beside it",
        ),
        ({"weight": quantized((12, 64)), "weight_scale": quantized((12, 1))}, "weight_scale is of torch.float8_e4m3fn"),
        (
            {"weight": quantized((12, 64)), "weight_scale": scales((12, 1)), "weight_scale_2": scales((1,))},
            "weight_scale_2 stands beside it",
        ),
        ({"weight": quantized((12, 64))}, "8-bit floats need their scale"),
        ({"weight": quantized((12, 64), torch.int8)}, "need their scale"),
    ],
)
def test_scales_that_cannot_be_applied_are_refused(tmp_path: Path, state: dict[str, torch.Tensor], says: str) -> None:
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(MatchError, match=rf"weight \(torch.* in the checkpoint, torch.float32 in the model.*{says}"):
        load(one(tuple(state["weight"].shape)), Checkpoint.open(tmp_path))


def test_half_of_the_columns_is_not_taken_for_all_of_them(tmp_path: Path) -> None:
    """Two 4-bit values in a byte come as int8, too."""
    save_file({"weight": quantized((12, 32), torch.int8), "weight_scale_inv": scales((12, 2))}, tmp_path / "model.safetensors")
    with pytest.raises(MatchError, match=r"weight: \[12, 64\] in the model, \[12, 32\] in the checkpoint"):
        load(one((12, 64)), Checkpoint.open(tmp_path))


def test_a_model_of_8_bit_values_gets_them_as_they_are(tmp_path: Path) -> None:
    values, scale = quantized((12, 16)), scales((12, 1))
    save_file({"weight": values, "weight_scale": scale}, tmp_path / "model.safetensors")
    model = one((12, 16), FP8)
    model.register_parameter("weight_scale", nn.Parameter(torch.empty(12, 1, device="meta")))
    load(model, Checkpoint.open(tmp_path), strict=True)
    assert torch.equal(model.weight.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(model.weight_scale, scale)
    floating = one((12, 16))
    floating.register_parameter("weight_scale", nn.Parameter(torch.empty(12, 1, device="meta")))
    found = match(floating, Checkpoint.open(tmp_path))
    assert [name for name, _ in found.refused] == ["weight"]


def plain(name: str, shape: tuple[int, ...]) -> nn.Module:
    model = nn.Module()
    model.register_module("layer", nn.Module())
    model.layer.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
    return model


@pytest.mark.parametrize(
    ("state", "packed"),
    [
        (  # compressed-tensors, with scales of another kind
            {
                "layer.weight_packed": torch.zeros(12, 8, dtype=torch.int32),
                "layer.weight_scale": scales((12,)),
                "layer.weight_shape": torch.tensor([12, 64]),
            },
            "layer.weight_packed",
        ),
        (  # compressed-tensors, NVFP4
            {
                "layer.weight_packed": torch.zeros(12, 32, dtype=torch.uint8),
                "layer.weight_scale": quantized((12, 4)),
                "layer.weight_global_scale": scales((1,)),
            },
            "layer.weight_packed",
        ),
        (  # ModelOpt, NVFP4
            {
                "layer.weight": torch.zeros(12, 32, dtype=torch.uint8),
                "layer.weight_scale": quantized((12, 4)),
                "layer.weight_scale_2": scales(()),
            },
            "layer.weight",
        ),
        (  # NVFP4 in pairs
            {"layer.weight": torch.zeros(12, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "layer.weight_scale": quantized((12, 4))},
            "layer.weight",
        ),
        (
            {
                "layer.weight": torch.zeros(12, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
                "layer.weight_scale": quantized((12, 4)),
                "layer.weight_global_scale": scales((1,)),
            },
            "layer.weight",
        ),
        (  # GPTQ
            {"layer.qweight": torch.zeros(8, 12, dtype=torch.int32), "layer.scales": scales((1, 12)), "layer.qzeros": torch.zeros(1, 2)},
            "layer.qweight",
        ),
        (  # a matrix, where gpt-oss has stacks of them
            {
                "layer.weight_blocks": torch.zeros(12, 2, 16, dtype=torch.uint8),
                "layer.weight_scales": torch.zeros(12, 2, dtype=torch.uint8),
            },
            "layer.weight_blocks",
        ),
    ],
)
def test_weights_packed_in_other_ways_are_refused_by_name(tmp_path: Path, state: dict[str, torch.Tensor], packed: str) -> None:
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(MatchError, match=rf"layer\.weight.*\({packed} is packed in a way that bigmodel does not read"):
        load(plain("weight", (12, 64)), Checkpoint.open(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offload_folder_gets_the_values_and_not_their_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    values, scale = quantized((12, 64)), scales((12, 1))
    save_file({"layer.weight": values, "layer.weight_scale": scale, "layer.bias": torch.ones(12)}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"layer": nn.Linear(64, 12, device="meta", dtype=dtype)})
    tied = nn.ModuleDict({"layer": nn.Linear(64, 12, device="meta", dtype=dtype), "other": nn.Linear(64, 12, bias=False)})
    tied["other"].weight = tied["layer"].weight
    expected = (values.float() * scale).to(dtype)
    for number, each in enumerate((model, tied)):
        folder = tmp_path / f"offloaded {number}"
        load_checkpoint_in_model(each, tmp_path, {"": "disk"}, offload_folder=folder)
        found = OffloadedWeightsLoader(save_folder=folder)
        assert all(torch.equal(found[name], expected) for name in dict(each.named_parameters(remove_duplicate=False)) if "weight" in name)
        assert torch.equal(found["layer.bias"], torch.ones(12, dtype=dtype))
        assert {file.name for file in folder.glob("*.dat")} == {f"{name}.weight.dat" for name in each}
    with pytest.raises(CheckpointError, match="changed"):
        save_changed(tmp_path, nn.ModuleDict({"layer": nn.Linear(64, 12, device="meta", dtype=dtype)}))
    assert not (tmp_path / "new").exists()


def save_changed(folder: Path, model: nn.Module) -> None:
    """A load whose file changes between the match and the reading."""
    original = into_model.placements

    def placements(*arguments: object, **named: object) -> object:
        (folder / "model.safetensors").touch()
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(into_model, "placements", placements)
        load_checkpoint_in_model(model, folder, {"": "disk"}, offload_folder=folder / "new")
