"""Two-way match: what would leave the model wrong is known, and told by name, before a byte is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import MatchError, PlanError
from bigmodel.loading import Checkpoint, Match, Renamed, dtype_rule, init_empty_weights, match, materialize
from bigmodel.protocols import TensorSpec


def matched(model: nn.Module, state: dict[str, torch.Tensor], folder: Path, **arguments: object) -> Match:
    save_file(state, folder / "model.safetensors")
    return match(model, Checkpoint.open(folder), **arguments)  # type: ignore[arg-type]


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_three_of_four_tensors_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    state = state_of(small())
    state["1.bais"] = state.pop("1.bias")
    found = matched(small(), state, tmp_path)
    assert (found.missing, found.unexpected) == (("1.bias",), ("1.bais",))
    with pytest.raises(
        MatchError, match=r"nothing fills 1 tensors of the model: 1\.bias \(nearest in the checkpoint: 1\.bais\)".capitalize()
    ):
        found.check()


def test_one_prefix_more_or_less_is_suggested_and_the_suggestion_works(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(MatchError, match=r"names start with 'model\.': load with Renamed\(strip_prefix=\"model\.\"\)"):
        matched(small(), {f"model.{name}": value for name, value in state_of(model).items()}, tmp_path).check()
    matched(
        small(), {f"model.{name}": value for name, value in state_of(model).items()}, tmp_path, rules=Renamed(strip_prefix="model.")
    ).check()
    wrapper = nn.ModuleDict({"base": small()})
    with pytest.raises(MatchError, match=r"names lack 'base\.': load with Renamed\(add_prefix=\"base\.\"\)"):
        matched(wrapper, state_of(model), tmp_path).check()
    matched(wrapper, state_of(model), tmp_path, rules=Renamed(add_prefix="base.")).check()


def test_both_shapes_are_told(tmp_path: Path) -> None:
    state = state_of(small()) | {"0.weight": torch.zeros(4, 5)}
    found = matched(small(), state, tmp_path)
    assert found.misshapen == (("0.weight", (4, 3), (4, 5)),)
    with pytest.raises(MatchError, match=r"0\.weight: \[4, 3\] in the model, \[4, 5\] in the checkpoint"):
        found.check()


def test_unexpected_entries_are_an_error_only_if_strict(tmp_path: Path) -> None:
    found = matched(
        small(), state_of(small()) | {"foo": torch.zeros(1), "bar.inv_freq": torch.zeros(1)}, tmp_path, ignore_unexpected=[r"inv_freq$"]
    )
    assert found.unexpected == ("foo",)
    found.check()
    with pytest.raises(MatchError, match="foo"):
        found.check(strict=True)


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    state = state_of(small()) | {"0.weight": torch.zeros(1)}
    del state["1.weight"]
    with pytest.raises(MatchError, match=r"(?s)1\.weight.*0\.weight: \[4, 3\]"):
        matched(small(), state, tmp_path).check()


@pytest.mark.parametrize("name", ["head.weight", "embed.weight"])
def test_a_tied_tensor_is_filled_by_whichever_name_is_there(tmp_path: Path, filled: nn.Module, tied: type[nn.Module], name: str) -> None:
    state = {each: value.clone() for each, value in filled.state_dict().items() if each not in ("head.weight", "embed.weight")}
    state[name] = filled.embed.weight.detach().clone()
    with init_empty_weights():
        model = tied()
    found = matched(model, state, tmp_path)
    found.check(strict=True)
    assert found.aliases == {"head.weight": "embed.weight"}
    materialize(model, found)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, filled.embed.weight)


def test_real_buffers_that_the_file_lacks_are_kept(tmp_path: Path, filled: nn.Module, tied: type[nn.Module]) -> None:
    state = {each: value.clone() for each, value in filled.state_dict().items() if each not in ("head.weight", "steps")}
    found = matched(tied(), state, tmp_path)
    assert found.kept == ("steps",)
    found.check()
    with pytest.raises(MatchError, match="steps"):
        found.check(strict=True)


def test_computed_buffers_on_meta_are_refused_by_name(tmp_path: Path, filled: nn.Module, tied: type[nn.Module]) -> None:
    state = {each: value.clone() for each, value in filled.state_dict().items() if each != "head.weight"}
    with torch.device("meta"):
        model = tied()
    found = matched(model, state, tmp_path)
    assert found.empty_buffers == ("rotary",)
    with pytest.raises(MatchError, match=r"no checkpoint holds: rotary; build the model under init_empty_weights"):
        found.check()
    found.check(allow_empty_buffers=True)
    del state["steps"]
    with pytest.raises(MatchError, match="steps"):
        matched(model, state, tmp_path).check(allow_empty_buffers=True)


@pytest.mark.parametrize(
    ("stored", "wanted", "scale"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, "0.weight_scale"),
        (torch.float8_e4m3fn, torch.float32, "0.weight_scale_inv"),
        (torch.int8, torch.float16, "0.SCB"),
        (torch.uint8, torch.float32, "0.weight.absmax"),
        (torch.float32, torch.float8_e5m2, None),
        (torch.float8_e5m2, torch.float8_e4m3fn, None),
        (torch.float32, torch.int8, None),
        (torch.int32, torch.float32, "0.weight.scales"),
        (torch.int64, torch.int32, None),
        (torch.uint8, torch.int8, None),
        (torch.complex64, torch.float32, None),
    ],
)
def test_scales_are_never_ignored(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, scale: str | None) -> None:
    model = nn.ModuleList([nn.Module()])
    model[0].register_parameter("weight", nn.Parameter(torch.zeros(2, 2, dtype=wanted), requires_grad=False))
    # Three scales for two rows: nothing tells what they are for.
    state = {"0.weight": torch.ones(2, 2).to(stored)} | ({scale: torch.ones(3)} if scale else {})
    with pytest.raises(MatchError, match=rf"0\.weight \({stored} in the checkpoint, {wanted} in the model.*{scale or ''}"):
        matched(model, state, tmp_path).check()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool, torch.int64])
def test_the_same_dtype_is_always_fine(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(4, dtype=dtype))
    value = torch.tensor([0, 1, 1, 0]).to(dtype)
    found = matched(model, {"x": value}, tmp_path)
    found.check()
    materialize(model, found)
    assert torch.equal(model.x.float(), value.float())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.bool, torch.float32),
        (torch.int32, torch.int64),
        (torch.uint8, torch.bool),
        (torch.float64, torch.float16),
        (torch.uint8, torch.int16),
    ],
)
def test_casts_that_keep_the_values_are_made(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.zeros(4, dtype=wanted))
    value = torch.tensor([0, 1, 1, 0]).to(stored)
    found = matched(model, {"x": value}, tmp_path)
    found.check()
    materialize(model, found)
    assert torch.equal(model.x, value.to(wanted))


def test_missing_names_can_be_allowed(tmp_path: Path) -> None:
    state = state_of(small())
    del state["1.bias"]
    model = small()
    found = matched(model, state, tmp_path, ignore_missing=[r"^1\.bias$"])
    found.check(strict=True)
    bias = model[1].bias.detach().clone()
    assert materialize(model, found).missing == ("1.bias",)
    assert torch.equal(model[1].bias, bias)


def test_an_alias_noted_in_the_file_fills_a_tensor_of_its_own(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"b": "a"})
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
    found = match(model, Checkpoint.open(tmp_path))
    found.check()
    materialize(model, found)
    assert torch.equal(model["b"], torch.ones(2))


def test_one_pattern_may_be_a_string(tmp_path: Path) -> None:
    state = {name: value for name, value in state_of(small()).items() if name[0] == "1"} | {"other": torch.ones(1)}
    found = matched(small(), state, tmp_path, ignore_missing="0.bias", ignore_unexpected="other")
    assert found.ignored == ("0.bias",)
    assert found.missing == ("0.weight",)
    assert found.unexpected == ()


@pytest.mark.parametrize("argument", ["ignore_missing", "ignore_unexpected"])
def test_what_is_no_pattern_is_named(tmp_path: Path, argument: str) -> None:
    with pytest.raises(PlanError, match=rf"{argument}.*'blocks\.\(5'"):
        matched(small(), state_of(small()), tmp_path, **{argument: ["fine", "blocks.(5"]})


def test_a_rule_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'\(a'"):
        matched(small(), state_of(small()), tmp_path, rules=Renamed([("(a", "b")]))


def test_one_module_that_is_kept_in_float32_may_be_a_string(tmp_path: Path) -> None:
    rule = dtype_rule(torch.float16, "norm")
    assert rule is not None
    spec = TensorSpec((1,), torch.float32)
    assert rule("layers.norm.weight", spec, torch.float32) == torch.float32
    assert rule("layers.n.weight", spec, torch.float32) == torch.float16
