"""What modules do in `load_state_dict` happens in a load: hooks before it and after it, and their own code. What cannot happen is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm

import bigmodel
from bigmodel.errors import MatchError
from bigmodel.loading import Checkpoint, Renamed, init_empty_weights, load, load_checkpoint_in_model, load_together

State = dict[str, torch.Tensor]
MAPS = [None, {"": "cpu"}, {"": "disk"}]


class Hooked(nn.Module):
    """Two layers, with a hook before the load."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.other = nn.Linear(3, 2)
        if hook is not None:
            self._register_load_state_dict_pre_hook(hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.linear(x))


def rename(state: State, prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + "old.")]:
        state[prefix + "linear." + name.removeprefix(prefix + "old.")] = state.pop(name)
    state.pop(prefix + "gone", None)


def double(state: State, prefix: str, *_: Any) -> None:
    state[prefix + "linear.weight"] = state[prefix + "linear.weight"] * 2


def double_in_place(state: State, prefix: str, *_: Any) -> None:
    state[prefix + "linear.weight"].mul_(2)


def double_a_view(state: State, prefix: str, *_: Any) -> None:
    state[prefix + "linear.weight"].data.view(-1)[:].mul_(2)


def split(state: State, prefix: str, *_: Any) -> None:
    both = state.pop(prefix + "both", None)
    if both is not None:
        state[prefix + "linear.weight"], state[prefix + "other.weight"] = both[:3], both[3:].reshape(3, 2).t()


def add_and_swap(state: State, prefix: str, *_: Any) -> None:
    first, second = state[prefix + "linear.bias"], state[prefix + "other.bias"]
    state[prefix + "linear.bias"] = torch.cat([second, torch.ones(1, device=first.device)]) + first
    state[prefix + "other.bias"] = torch.zeros(2)


def swap(state: State, prefix: str, *_: Any) -> None:
    state[prefix + "other.bias"] = state.pop(prefix + "a")
    state[prefix + "a"] = state.pop(prefix + "b")
    state[prefix + "linear.bias"] = state.pop(prefix + "a")


def tensors() -> State:
    torch.manual_seed(0)
    return {name: torch.randn_like(value) for name, value in nn.Sequential(Hooked(), nn.Linear(2, 2)).state_dict().items()}


def old_names() -> State:
    return {name.replace("0.linear", "0.old"): value for name, value in tensors().items()} | {"0.gone": torch.ones(3)}


def joined() -> State:
    state = tensors()
    return state | {"0.both": torch.cat([state.pop("0.linear.weight"), state.pop("0.other.weight").t()])}


def lettered() -> State:
    return {{"0.other.bias": "0.a", "0.linear.bias": "0.b"}.get(name, name): value for name, value in tensors().items()}


CASES = [
    (rename, old_names),
    (swap, lettered),
    (double, tensors),
    (double_in_place, tensors),
    (double_a_view, tensors),
    (split, joined),
    (add_and_swap, tensors),
]


def pair(hook: Callable[..., None] | None) -> nn.Module:
    return nn.Sequential(Hooked(hook), nn.Linear(2, 2))


def by_torch(model: nn.Module, state: State) -> State:
    model.load_state_dict({name: value.clone() for name, value in state.items()})
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Any], wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(("hook", "state"), CASES, ids=lambda case: case.__name__)
def test_names_and_values_are_those_of_torch(
    tmp_path: Path, hook: Callable[..., None], state: Callable[[], State], suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / f"model.{suffix}"
    save_file(state(), file) if suffix == "safetensors" else torch.save(state(), file)
    wanted = by_torch(pair(hook), state())
    caplog.set_level(logging.WARNING)
    for device_map in (None, {"": "cpu"}):
        for is_empty in (False, True):
            with init_empty_weights() if is_empty else torch.no_grad():
                model = pair(hook)
            load_checkpoint_in_model(model, file, device_map=device_map, strict=True)
            assert_same(model.state_dict(), wanted)
    model = pair(hook)
    bigmodel.load_checkpoint_and_dispatch(model, file, device_map={"": "disk"}, strict=True)
    x = torch.randn(4, 2)
    plain = pair(None)
    plain.load_state_dict(wanted)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert not caplog.records


@pytest.mark.parametrize(("hook", "state"), CASES, ids=lambda case: case.__name__)
def test_an_offload_folder_has_what_the_hooks_make(tmp_path: Path, hook: Callable[..., None], state: Callable[[], State]) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    model = pair(hook)
    load_checkpoint_in_model(model, tmp_path / "model.safetensors", device_map={"": "disk"}, offload_folder=tmp_path / "folder")
    weights = bigmodel.utils.OffloadedWeightsLoader(save_folder=tmp_path / "folder")
    assert_same({name: weights[name] for name in weights}, by_torch(pair(hook), state()))


def test_dtypes_and_names_of_the_callers_rules(tmp_path: Path) -> None:
    save_file({f"net.{name}": value for name, value in old_names().items()}, tmp_path / "model.safetensors")
    model = pair(rename)
    load(model, Checkpoint.open(tmp_path), rules=Renamed(strip_prefix="net."), strict=True, dtype_of=lambda *_: torch.bfloat16)
    assert_same(model.state_dict(), {name: value.bfloat16() for name, value in by_torch(pair(rename), old_names()).items()})


def test_hooks_of_parents_come_before_those_of_children(tmp_path: Path) -> None:
    def parents(state: State, prefix: str, *_: Any) -> None:
        for name in list(state):
            state[name.replace("first.", "0.")] = state.pop(name)

    def build() -> nn.Module:
        model = pair(double)
        model._register_load_state_dict_pre_hook(parents)
        model[0].linear.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: state.update({prefix + "weight": state[prefix + "weight"] + 1})
        )
        return model

    state = {name.replace("0.", "first."): value for name, value in tensors().items()}
    save_file(state, tmp_path / "model.safetensors")
    model = build()
    load_checkpoint_in_model(model, tmp_path)
    assert_same(model.state_dict(), by_torch(build(), state))
    assert torch.equal(model[0].linear.weight, tensors()["0.linear.weight"] * 2 + 1)


@pytest.mark.parametrize("device_map", MAPS)
def test_old_checkpoints_of_weight_norm(tmp_path: Path, device_map: Any, caplog: pytest.LogCaptureFixture) -> None:
    old = nn.Sequential(old_weight_norm(nn.Linear(3, 4)), old_weight_norm(nn.Linear(4, 3), dim=1))
    save_file(old.state_dict(), tmp_path / "model.safetensors")

    def build() -> nn.Module:
        return nn.Sequential(weight_norm(nn.Linear(3, 4)), weight_norm(nn.Linear(4, 3), dim=1))

    wanted = by_torch(build(), old.state_dict())
    model = build()
    load_checkpoint_in_model(model, tmp_path, device_map=device_map, offload_folder=tmp_path / "folder", strict=True)
    found = (
        dict(bigmodel.utils.OffloadedWeightsLoader(save_folder=tmp_path / "folder")) if device_map == {"": "disk"} else model.state_dict()
    )
    assert_same(found, wanted)
    assert not caplog.records


@pytest.mark.parametrize("old", [False, True])
def test_hooks_are_told_the_versions_of_a_state_dict(tmp_path: Path, old: bool) -> None:
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: State, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            if metadata.get("version", 1) < 2:
                state[prefix + "weight"] = state[prefix + "weight"].t()
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    saved = nn.Sequential(nn.Linear(2, 2) if old else Versioned(2, 2))
    torch.save(saved.state_dict(), tmp_path / "model.bin")
    model = nn.Sequential(Versioned(2, 2))
    load_checkpoint_in_model(model, tmp_path / "model.bin")
    assert torch.equal(model[0].weight, saved[0].weight.t() if old else saved[0].weight)


def by_values(state: State, prefix: str, *_: Any) -> None:
    if state[prefix + "linear.weight"].sum() > 0:
        state[prefix + "linear.weight"] = state[prefix + "linear.weight"] * 2


def failing(state: State, prefix: str, *_: Any) -> None:
    del state[prefix + "linear.weight"]
    raise RuntimeError("no such luck")


def complaining(state: State, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: list[str]) -> None:
    errors.append("too old")


@pytest.mark.parametrize(("hook", "words"), [(by_values, "meta"), (failing, "no such luck"), (complaining, "too old")])
def test_what_cannot_be_followed_is_named_and_left_out(
    tmp_path: Path, hook: Callable[..., None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    for device_map in MAPS[:2]:
        caplog.clear()
        model = pair(hook)
        load_checkpoint_in_model(model, tmp_path, device_map=device_map)
        assert_same(model.state_dict(), tensors())
        (record,) = caplog.records
        assert "0 (Hooked)" in record.getMessage()
        assert hook.__name__ in record.getMessage()
        assert words in record.getMessage()
        assert "load_state_dict of the module itself" in record.getMessage()


def test_too_many_computed_tensors_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigmodel.loading.hooked.MOST_NAMES", 3)
    save_file(tensors(), tmp_path / "model.safetensors")
    model = pair(double)
    load_checkpoint_in_model(model, tmp_path)
    assert_same(model.state_dict(), tensors())
    assert "computes 1 tensors among 4" in caplog.text


class Renaming(nn.Linear):
    """Code of its own that changes names alone."""

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel").t()
        super()._load_from_state_dict(state, prefix, *rest)


class Noting(nn.Linear):
    """Code of its own that changes the module."""

    loaded = False

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.loaded = True
        super()._load_from_state_dict(*arguments)


class Scaling(nn.Linear):
    """Code of its own that changes what has been loaded."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.weight.data.mul_(2)


class ByItself(nn.Linear):
    """Code of its own that does not call torch's."""

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = state[prefix + name]  # type: ignore[union-attr]


def test_code_of_modules_that_changes_names_and_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = torch.randn(2, 3)
    save_file({"0.kernel": kernel, "0.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    model = nn.Sequential(Renaming(2, 3))
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert torch.equal(model[0].weight, kernel.t())
    assert not caplog.records


@pytest.mark.parametrize("kind", [Noting, Scaling, ByItself])
def test_code_of_modules_that_does_more_is_named(tmp_path: Path, kind: type[nn.Linear], caplog: pytest.LogCaptureFixture) -> None:
    saved = nn.Linear(2, 3)
    save_file({f"0.{name}": value for name, value in saved.state_dict().items()}, tmp_path / "model.safetensors")
    model = nn.Sequential(kind(2, 3))
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model[0].weight, saved.weight)
    assert f"0 ({kind.__name__}): its {kind.__name__}._load_from_state_dict" in caplog.text
    assert not getattr(model[0], "loaded", False)


class After(nn.Module):
    """Keeps what it saw after a load."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("extra", torch.zeros(1))
        self.seen: torch.Tensor | None = None
        self.missing: list[str] = []
        self.register_load_state_dict_post_hook(self.after)

    @staticmethod
    def after(module: After, keys: Any) -> None:
        module.seen = module.linear.weight.detach().clone()
        module.missing = list(keys.missing_keys)
        if module.seen[0, 0] > 100:
            raise RuntimeError("too big")


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_hooks_after_a_load(tmp_path: Path, device_map: Any) -> None:
    weight = torch.randn(3, 2)
    save_file({"0.linear.weight": weight, "0.linear.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    model: Any = nn.Sequential(After())
    load_checkpoint_in_model(model, tmp_path, device_map=device_map)
    assert torch.equal(model[0].seen, weight)
    assert model[0].missing == ["0.extra"]


def load_in_all(folder: str) -> None:
    for rank0_reads in (False, True):
        model: Any = nn.Sequential(pair(split), After())
        load_together(model, folder, rank0_reads=rank0_reads)
        wanted = by_torch(pair(split), joined())
        assert_same(model[0].state_dict(), wanted)
        assert torch.equal(model[1].seen, torch.ones(3, 2))


def test_several_processes(tmp_path: Path, processes: Callable[[int], Processes]) -> None:
    state = {f"0.{name}": value for name, value in joined().items()}
    save_file(state | {"1.linear.weight": torch.ones(3, 2), "1.linear.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    processes(2).run(load_in_all, str(tmp_path))


def test_a_hook_after_a_load_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    save_file({"0.linear.weight": torch.full((3, 2), 200.0), "0.linear.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    model: Any = nn.Sequential(After())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="too big"):
        load_checkpoint_in_model(model, tmp_path)
    assert_same(model.state_dict(), before)


def test_hooks_after_a_load_of_modules_on_disk_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"0.linear.weight": torch.ones(3, 2), "0.linear.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model: Any = nn.Sequential(After())
    load_checkpoint_in_model(model, tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "folder")
    assert model[0].seen is None
    assert "0 (After)" in caplog.text
    assert "post-hooks" in caplog.text


def test_torchs_own_modules_make_no_noise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        layers = [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.MultiheadAttention(4, 2), nn.LSTM(2, 2)]
        return nn.Sequential(*layers, nn.utils.spectral_norm(nn.Linear(2, 2)), nn.TransformerEncoderLayer(4, 2, 4))

    saved = build()
    without = {name: value for name, value in saved.state_dict().items() if "num_batches_tracked" not in name}
    torch.save(saved.state_dict(), tmp_path / "whole.bin")
    save_file(without, tmp_path / "old.safetensors")
    for name in ("whole.bin", "old.safetensors"):
        model = build()
        load_checkpoint_in_model(model, tmp_path / name)
        assert_same(model.state_dict(), saved.state_dict())
    assert not caplog.records


def test_missing_tensors_are_still_an_error(tmp_path: Path) -> None:
    state = old_names()
    del state["0.old.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(MatchError, match=r"0\.linear\.bias"):
        load_checkpoint_in_model(pair(rename), tmp_path)


def test_entries_of_no_use_are_told_by_their_names_in_the_checkpoint(tmp_path: Path) -> None:
    save_file(old_names() | {"0.old.more": torch.ones(1), "2.x": torch.ones(1)}, tmp_path / "model.safetensors")
    report = load(pair(rename), Checkpoint.open(tmp_path))
    assert sorted(report.unexpected) == ["0.old.more", "2.x"]


def test_models_of_transformers_make_no_noise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    frozen = pytest.importorskip("transformers.models.detr.modeling_detr").DetrFrozenBatchNorm2d
    config = transformers.MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1, expand=1, time_step_rank=2)
    bert = transformers.BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    for build in (lambda: transformers.MambaModel(config), lambda: transformers.BertModel(bert), lambda: nn.Sequential(frozen(3))):
        saved = build()
        torch.save(saved.state_dict(), tmp_path / "model.bin")
        model = build()
        load_checkpoint_in_model(model, tmp_path / "model.bin", strict=True)
        assert_same(model.state_dict(), saved.state_dict())
    assert not caplog.records
