"""Integers of a few bits, as compressed-tensors, GPTQ and AWQ pack them, fill floating models with the values that they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError, MatchError
from bigmodel.loading import Checkpoint, load, transfer
from bigmodel.loading.keys import Concatenate, Source, Stack, Whole

State = dict[str, torch.Tensor]


def linear(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.ModuleDict({"layer": nn.Linear(columns, rows, bias=False, dtype=dtype, device="meta")}).requires_grad_(False)


def numbers(shape: tuple[int, ...], bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def factors(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.01).to(dtype)


def word(parts: list[int], bits: int) -> int:
    """An int32 with `parts` in it, the first in the lowest bits."""
    made = sum(part << (bits * place) for place, part in enumerate(parts))
    return made - (1 << 32) if made >= 1 << 31 else made


def packed_columns(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Value by value: (rows, columns) → int32 (rows, columns × bits / 32); `order` says which of a word's values comes first."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows = values.tolist()
    missing = -values.shape[1] % count
    return torch.tensor(
        [
            [word([(row + [0] * missing)[start + place] for place in order], bits) for start in range(0, len(row) + missing, count)]
            for row in rows
        ],
        dtype=torch.int32,
    )


def compressed(rows: int, columns: int, groups: int, zeros: str = "", order: bool = False) -> tuple[State, torch.Tensor]:
    """A layer of compressed-tensors, and the values that it stands for."""
    integers, scale = numbers((rows, columns), 4), factors((rows, groups), torch.bfloat16)
    state = {
        "layer.weight_packed": packed_columns(integers, 4),
        "layer.weight_scale": scale,
        "layer.weight_shape": torch.tensor([rows, columns]),
    }
    zero = torch.full((rows, groups), 8)
    if zeros:
        zero = numbers((rows, groups), 4, 1)
        state["layer.weight_zero_point"] = packed_columns(zero.T, 4).T.contiguous() if zeros == "packed" else (zero - 8).to(torch.int8)
    group_of = torch.arange(columns) // (columns // groups)
    if order:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]
        state["layer.weight_g_idx"] = group_of.to(torch.int32)
    return state, (integers - zero[:, group_of]) * scale[:, group_of].double()


def gptq(outputs: int, inputs: int, groups: int, bits: int, less: int, symmetric: bool, order: bool) -> tuple[State, torch.Tensor]:
    """A layer of GPTQ, and the values that it stands for."""
    integers, scale = numbers((inputs, outputs), bits), factors((groups, outputs))
    zero = torch.full((groups, outputs), 1 << (bits - 1)) if symmetric else numbers((groups, outputs), bits, 1)
    group_of = torch.arange(inputs) // (inputs // groups)
    if order:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
    state = {
        "layer.qweight": packed_columns(integers.T, bits).T.contiguous(),
        "layer.qzeros": packed_columns((zero - less) % (1 << bits), bits),
        "layer.scales": scale,
        "layer.g_idx": group_of.to(torch.int32),
    }
    return state, ((integers - zero[group_of]) * scale[group_of].double()).T


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(outputs: int, inputs: int, groups: int) -> tuple[State, torch.Tensor]:
    """A layer of AWQ, and the values that it stands for."""
    integers, scale, zero = numbers((inputs, outputs), 4), factors((groups, outputs)), numbers((groups, outputs), 4, 1)
    group_of = torch.arange(inputs) // (inputs // groups)
    state = {
        "layer.qweight": packed_columns(integers, 4, AWQ_ORDER),
        "layer.qzeros": packed_columns(zero, 4, AWQ_ORDER),
        "layer.scales": scale,
    }
    return state, ((integers - zero[group_of]) * scale[group_of].double()).T


CASES: dict[str, Callable[[], tuple[State, torch.Tensor]]] = {
    "compressed": lambda: compressed(19, 64, 4),
    "compressed, one group": lambda: compressed(5, 24, 1, "packed"),
    "compressed, zeros": lambda: compressed(19, 64, 4, "packed"),
    "compressed, plain zeros": lambda: compressed(19, 64, 4, "plain"),
    "compressed, reordered": lambda: compressed(19, 64, 4, "packed", order=True),
    "compressed, reordered, symmetric": lambda: compressed(19, 64, 4, order=True),
    "gptq": lambda: gptq(24, 96, 3, 4, 1, symmetric=False, order=False),
    "gptq, reordered": lambda: gptq(24, 96, 3, 4, 1, symmetric=False, order=True),
    "gptq, 2 bits": lambda: gptq(32, 96, 3, 2, 1, symmetric=False, order=True),
    "gptq, 8 bits": lambda: gptq(24, 96, 1, 8, 1, symmetric=False, order=False),
    "awq": lambda: awq(24, 96, 3),
    "awq, one group": lambda: awq(8, 40, 1),
}
BITS = {"gptq, 2 bits": 2, "gptq, 8 bits": 8}
"""Where they are not 4."""


def saved(folder: Path, state: State, quantization: dict[str, object] | None = None) -> Checkpoint:
    save_file(state, folder / "model.safetensors")
    if quantization is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return Checkpoint.open(folder)


@pytest.mark.parametrize("unpacked_bytes", [1, 3000, 4 << 20])
@pytest.mark.parametrize("case", CASES)
def test_the_values_are_those_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, unpacked_bytes: int) -> None:
    monkeypatch.setattr(transfer, "UNPACKED_BYTES", unpacked_bytes)
    state, meaning = CASES[case]()
    checkpoint = saved(tmp_path, state, {"bits": BITS.get(case, 4)})
    for dtype in (torch.float32, torch.bfloat16):
        model = linear(*meaning.shape, dtype)
        report = load(model, checkpoint, strict=True)
        assert report.unexpected == ()
        assert torch.equal(model["layer"].weight, meaning.float().to(dtype))
        store = load(linear(*meaning.shape, dtype), checkpoint, {"": "disk"}).store
        assert store is not None
        rows = torch.tensor([meaning.shape[0] - 1, 0, 3])
        found = torch.empty(3, meaning.shape[1], dtype=dtype)
        store.read_rows("layer.weight", rows, found)
        assert torch.equal(found, meaning.float().to(dtype)[rows])


def test_what_the_library_compressed_tensors_packed_is_what_it_unpacks(tmp_path: Path) -> None:
    """Literals from compressed-tensors 0.20.1: what its `pack_to_int32` and `PackedQuantizationCompressor.decompress` gave."""
    packed = [[1392285232, -629924168], [-916255321, 1105954095], [819622942, -1202520938], [-1488852091, 801727245]]
    packed += [[515396348, -1775183244], [-2060465821, 229065195], [-57265958, 1948170322], [1661839169, -343593015]]
    state = {
        "layer.weight_packed": torch.tensor([*packed, [-629924168, 1392285232]], dtype=torch.int32),
        "layer.weight_scale": (1 + torch.arange(18).view(9, 2) / 8).bfloat16(),
        "layer.weight_shape": torch.tensor([9, 16]),
    }
    symmetric, last = (
        linear(9, 16, torch.bfloat16),
        [0, 9, 18, -21, -12, -3, 6, 15, -25, -15.625, -6.25, 3.125, 12.5, 21.875, -18.75, -9.375],
    )
    load(symmetric, saved(tmp_path, state), strict=True)
    assert symmetric["layer"].weight[8].tolist() == last
    assert symmetric["layer"].weight.double().sum() == -147.5
    state["layer.weight_zero_point"] = torch.tensor([[1814619296, -1317193227], [0, 5]], dtype=torch.int32)
    asymmetric, last = linear(9, 16, torch.bfloat16), [24, 33, 42, 3, 12, 21, 30, 39, -15.625, -6.25, 3.125, 12.5, 21.875, 31.25, -9.375, 0]
    load(asymmetric, saved(tmp_path, state), strict=True)
    assert asymmetric["layer"].weight[8].tolist() == last
    assert asymmetric["layer"].weight.double().sum() == 223.375


@pytest.mark.parametrize(("called", "less"), [("gptq", 1), (None, 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("place", ["config.json", "quantize_config.json"])
def test_the_configuration_beside_the_file_tells_how_zeros_are_stored(tmp_path: Path, called: str | None, less: int, place: str) -> None:
    state, meaning = gptq(24, 96, 3, 4, less, symmetric=False, order=False)
    described = {"bits": 4, "desc_act": False} | ({} if called is None else {"checkpoint_format": called})
    (tmp_path / place).write_text(json.dumps({"quantization_config": described} if place == "config.json" else described))
    model = linear(24, 96)
    load(model, saved(tmp_path, state), strict=True)
    assert torch.equal(model["layer"].weight, meaning.float())


@pytest.mark.parametrize("less", [0, 1])
def test_without_a_configuration_only_symmetric_zeros_are_beyond_doubt(tmp_path: Path, less: int) -> None:
    state, meaning = gptq(24, 96, 3, 4, less, symmetric=True, order=False)
    model = linear(24, 96)
    load(model, saved(tmp_path, state), strict=True)
    assert torch.equal(model["layer"].weight, meaning.float())
    state, _ = gptq(24, 96, 3, 4, less, symmetric=False, order=False)
    with pytest.raises(
        CheckpointError, match=r"layer\.qzeros' may be stored as they are or less 1 .*Put the model's quantize_config\.json"
    ):
        load(linear(24, 96), saved(tmp_path, state))


def test_other_formats_under_the_same_names_are_refused(tmp_path: Path) -> None:
    state, meaning = gptq(24, 96, 3, 4, 1, symmetric=True, order=False)
    with pytest.raises(MatchError, match=r"layer\.weight \(layer\.qweight is packed in a way that bigmodel does not read"):
        load(linear(*meaning.shape), saved(tmp_path, state, {"checkpoint_format": "marlin"}))
    state, meaning = compressed(16, 64, 2)
    with pytest.raises(MatchError, match=r"\[16, 32\] in the model, \[16, 64\] in the checkpoint \(layer\.weight_packed as 4-bit integers"):
        load(linear(16, 32), saved(tmp_path, state))
    state["layer.weight_shape"] = torch.tensor([16, 61])
    with pytest.raises(CheckpointError, match=r"'layer\.weight_shape' is \[16, 61\]; .* 4-bit integers would be \[16, 64\]"):
        load(linear(16, 64), saved(tmp_path, state))


def test_groups_that_there_are_not_are_named(tmp_path: Path) -> None:
    state, meaning = gptq(24, 96, 3, 4, 1, symmetric=True, order=False)
    state["layer.g_idx"][5] = 3
    with pytest.raises(CheckpointError, match=r"'layer\.g_idx': damaged: names groups beyond the 3"):
        load(linear(*meaning.shape), saved(tmp_path, state))


@pytest.mark.parametrize("wrong", [4, -1])
@pytest.mark.parametrize("zeros", ["", "packed"])
def test_groups_of_compressed_tensors_that_there_are_not_are_named(tmp_path: Path, zeros: str, wrong: int) -> None:
    state, meaning = compressed(19, 64, 4, zeros, order=True)
    state["layer.weight_g_idx"][5] = wrong
    with pytest.raises(CheckpointError, match=r"'layer\.weight_g_idx': damaged: names groups beyond the 4"):
        load(linear(*meaning.shape), saved(tmp_path, state))


def test_columns_of_compressed_tensors_that_were_not_reordered_have_no_groups_of_their_own(tmp_path: Path) -> None:
    state, meaning = compressed(19, 64, 4, "packed")
    state["layer.weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    model = linear(*meaning.shape)
    load(model, saved(tmp_path, state), strict=True)
    assert torch.equal(model["layer"].weight, meaning.float())


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("gptq, reordered", "scales"),
        ("gptq", "qzeros"),
        ("awq", "scales"),
        ("awq", "qzeros"),
        ("compressed", "weight_scale"),
        ("compressed", "weight_shape"),
    ],
)
def test_a_companion_that_is_lost_is_named(tmp_path: Path, kind: str, lost: str) -> None:
    state, meaning = CASES[kind]()
    del state[f"layer.{lost}"]
    with pytest.raises(
        MatchError, match=rf"packed, but layer\.{lost}, which belongs to it, is not in the checkpoint: .*get the checkpoint again"
    ):
        load(linear(*meaning.shape), saved(tmp_path, state, {"bits": 4}))


@pytest.mark.parametrize(("kind", "damaged"), [("gptq", "scales"), ("awq", "qzeros"), ("compressed", "weight_scale")])
def test_the_shapes_of_what_does_not_belong_together_are_told(tmp_path: Path, kind: str, damaged: str) -> None:
    state, meaning = CASES[kind]()
    state[f"layer.{damaged}"] = state[f"layer.{damaged}"][:-1].clone()
    with pytest.raises(MatchError, match=rf"bigmodel does not read.*{damaged} {re.escape(str(list(state[f'layer.{damaged}'].shape)))}"):
        load(linear(*meaning.shape), saved(tmp_path, state, {"bits": 4}))


@pytest.mark.parametrize(
    ("described", "zeros", "order", "lost"),
    [
        ({"symmetric": False}, "packed", False, "zero_point"),
        ({"actorder": "group"}, "", True, "g_idx"),
        ({"actorder": True}, "", True, "g_idx"),
    ],
)
def test_what_the_configuration_promises_may_not_be_lost(
    tmp_path: Path, described: dict[str, object], zeros: str, order: bool, lost: str
) -> None:
    state, meaning = compressed(16, 64, 4, zeros, order)
    quantization: dict[str, object] = {"config_groups": {"group_0": {"weights": {"num_bits": 4, **described}}}}
    model = linear(*meaning.shape)
    load(model, saved(tmp_path, state, quantization), strict=True)
    assert torch.equal(model["layer"].weight, meaning.float())
    del state[f"layer.weight_{lost}"]
    with pytest.raises(MatchError, match=rf"packed, but layer\.weight_{lost}, which belongs to it, is not in the checkpoint"):
        load(linear(*meaning.shape), saved(tmp_path, state, quantization))


@pytest.mark.parametrize(
    "described", [[], "text", {"config_groups": [1]}, {"config_groups": {"group_0": None}}, {"config_groups": {"a": {"weights": 3}}}]
)
def test_a_configuration_that_says_nothing_promises_nothing(tmp_path: Path, described: object) -> None:
    state, meaning = compressed(16, 64, 4)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    model = linear(*meaning.shape)
    load(model, saved(tmp_path, state), strict=True)
    assert torch.equal(model["layer"].weight, meaning.float())


def test_a_weight_that_is_packed_twice_is_refused(tmp_path: Path) -> None:
    state = CASES["compressed, one group"]()[0] | gptq(8, 40, 1, 4, 1, symmetric=True, order=False)[0]
    with pytest.raises(MatchError, match=r"packed in several ways, layer\.weight_packed and layer\.qweight"):
        load(linear(8, 40), saved(tmp_path, state, {"bits": 4}))


class Stacked:
    """Experts' projections, stacked and fused as transformers does it."""

    def sources(self, entries: object, targets: object) -> tuple[dict[str, Source], list[str]]:
        fused = tuple(Concatenate((Whole(f"{number}.gate.weight"), Whole(f"{number}.up.weight")), 0) for number in range(2))
        return {"weight": Stack(fused)}, []


@pytest.mark.parametrize("kind", ["compressed, zeros", "gptq", "awq"])
def test_key_rules_work_on_the_values(tmp_path: Path, kind: str) -> None:
    made, meaning = CASES[kind]()
    state = {
        name.replace("layer", f"{number}.{part}"): value.clone()
        for number in range(2)
        for part in ("gate", "up")
        for name, value in made.items()
    }
    scale = "weight_scale" if kind.startswith("compressed") else "scales"
    state[f"1.up.{scale}"] *= 2
    model = nn.Module()
    rows, columns = meaning.shape
    model.weight = nn.Parameter(torch.empty(2, 2 * rows, columns, device="meta"), requires_grad=False)
    load(model, saved(tmp_path, state, {"bits": 4}), rules=Stacked())
    once = meaning.float()
    assert torch.equal(model.weight, torch.stack([torch.cat([once, once]), torch.cat([once, 2 * once])]))


def test_a_model_that_has_the_packed_tensors_gets_them_as_they_are(tmp_path: Path) -> None:
    state, _ = CASES["awq"]()
    model = nn.ModuleDict({"layer": nn.Module()})
    for name, value in state.items():
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        model["layer"].register_parameter(name.removeprefix("layer."), nn.Parameter(empty, requires_grad=False))
    load(model, saved(tmp_path, state), strict=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
