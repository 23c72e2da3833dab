"""What modules keep by `get_extra_state` is saved and set again: tensors as they are, plain values as text; nothing else, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import Processes
from torch import nn

import bigmodel
from bigmodel.errors import CheckpointError, MatchError
from bigmodel.loading import Checkpoint, Renamed, init_empty_weights, load, load_checkpoint_in_model, load_together, match, save_model


class Keeping(nn.Module):
    """A linear layer with something beside its weights."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, str) and state == "refuse":
            raise ValueError("not this one")
        self.extra = state


def pair(first: Any = None, second: Any = None) -> nn.Module:
    return nn.Sequential(Keeping(first), Keeping(second))


def empty() -> Any:
    with init_empty_weights():
        return pair()


TENSORS = [torch.arange(5), torch.randn(2, 3).bfloat16(), torch.tensor(2.5), torch.empty(0), torch.tensor([1, 2], dtype=torch.uint8)]
PLAIN = [None, 3, 0.1, "text", True, [1, [None, "x"]], {"a": {"b": [1.5, False]}, "ü": ""}]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("value", TENSORS)
def test_tensors_are_saved_as_they_are(tmp_path: Path, value: torch.Tensor, safe: bool) -> None:
    saved = pair(value, value + 1)
    save_model(saved, tmp_path, safe_serialization=safe)
    for rules in (None, Renamed()):
        model = empty()
        report = load(model, Checkpoint.open(tmp_path), strict=True, rules=rules)
        assert report.unexpected == report.kept == ()
        for own, loaded in zip(saved, model, strict=True):
            assert loaded.extra.dtype == value.dtype
            assert torch.equal(loaded.extra, own.extra)
    if safe:
        by_torch = pair(torch.ones(1), torch.zeros(1))
        safetensors.torch.load_model(by_torch, tmp_path / "model.safetensors")
        assert torch.equal(by_torch[1].extra, value + 1)


@pytest.mark.parametrize("limit", [10**9, 1])
@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_come_back_as_they_were(tmp_path: Path, value: Any, limit: int) -> None:
    saved = pair(value, torch.ones(3))
    save_model(saved, tmp_path, limit, metadata={"who": "me"})
    model = empty()
    load(model, Checkpoint.open(tmp_path), {"": "disk"}, strict=True)
    assert model[0].extra == value
    assert type(model[0].extra) is type(value)
    assert torch.equal(model[1].extra, torch.ones(3))


def endless() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, b"bytes", {"a": torch.ones(1)}, object(), endless(), nested(3000), [10**5000]])
def test_what_no_file_holds_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'1\._extra_state' in the state dict is an? \w+, not a tensor.*Let get_extra_state give"):
        save_model(pair(None, value), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match=r"'0\._extra_state' .* use safe_serialization=True"):
        save_model(pair(3), tmp_path / "new", safe_serialization=False)


def test_renamed_checkpoints_and_dispatched_models(tmp_path: Path) -> None:
    saved = bigmodel.dispatch_model(pair({"scale": 2}, torch.ones(2)), {"": "cpu"}, force_hooks=True)
    bigmodel.save_model(saved, tmp_path)
    model = empty()
    load(model[0], Checkpoint.open(tmp_path), rules=Renamed(strip_prefix="0."), ignore_unexpected=["^1"])
    assert model[0].extra == {"scale": 2}
    offloaded = bigmodel.load_checkpoint_and_dispatch(empty(), tmp_path, {"0": "cpu", "1": "disk"})
    assert offloaded[0].extra == {"scale": 2}
    assert torch.equal(offloaded[1].extra, torch.ones(2))


def test_a_checkpoint_without_them_leaves_them_and_says_so(tmp_path: Path) -> None:
    save_model(nn.Sequential(nn.ModuleDict({"linear": nn.Linear(2, 3)}), nn.ModuleDict({"linear": nn.Linear(2, 3)})), tmp_path)
    model = pair("kept", 1)
    report = load(model, Checkpoint.open(tmp_path))
    assert report.kept == ("0._extra_state", "1._extra_state")
    assert model[0].extra == "kept"
    with pytest.raises(MatchError, match=r"extra states missing in the checkpoint: 0\._extra_state, 1\._extra_state"):
        load(model, Checkpoint.open(tmp_path), strict=True)
    assert match(model, Checkpoint.open(tmp_path), ignore_missing=["_extra_state$"]).kept == ()


def test_a_model_that_takes_none_says_that_they_are_unexpected(tmp_path: Path) -> None:
    save_model(pair(1, 2), tmp_path)
    model = nn.Sequential(nn.ModuleDict({"linear": nn.Linear(2, 3)}), nn.ModuleDict({"linear": nn.Linear(2, 3)}))
    assert load(model, Checkpoint.open(tmp_path)).unexpected == ("0._extra_state", "1._extra_state")


def test_one_that_refuses_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    save_model(pair(1, "refuse"), tmp_path)
    model = empty()
    model[0].extra = {"before": 1}
    with pytest.raises(CheckpointError, match=r"'1\._extra_state': the Keeping does not take it: ValueError\('not this one'\)"):
        load(model, Checkpoint.open(tmp_path))
    assert model[0].extra == {"before": 1}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_damaged_text_is_named(tmp_path: Path) -> None:
    state = {"_extra_state": torch.tensor([123, 1], dtype=torch.uint8), "linear.weight": torch.ones(3, 2), "linear.bias": torch.ones(3)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"_extra_state": "application/json"})
    with pytest.raises(CheckpointError, match="'_extra_state': damaged: should be JSON"):
        load(Keeping(), Checkpoint.open(tmp_path))


def load_in_all(folder: str) -> None:
    for read in (load_together, lambda *given: load_checkpoint_in_model(*given, broadcast_from_rank0=True)):
        model = empty()
        read(model, folder)
        assert json.dumps(model[0].extra) == '{"step": 7}'
        assert torch.equal(model[1].extra, torch.arange(4))


def test_several_processes(tmp_path: Path, processes: Callable[[int], Processes]) -> None:
    save_model(pair({"step": 7}, torch.arange(4)), tmp_path)
    processes(2).run(load_in_all, str(tmp_path))


@pytest.mark.parametrize("value", [*PLAIN, 7, {"v": 7}, (1, (2, "x")), {1: b"bytes"}, torch.arange(3)])
def test_whatever_plain_value_torch_has_saved_is_set(tmp_path: Path, value: Any) -> None:
    torch.save(pair(value, None).state_dict(), tmp_path / "model.bin")
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "model.bin", strict=True)
    assert torch.equal(model[0].extra, value) if isinstance(value, torch.Tensor) else model[0].extra == value
    assert type(model[0].extra) is type(value)
    assert model[1].extra is None
    renamed = empty()
    load(renamed[0], Checkpoint.open(tmp_path / "model.bin"), rules=Renamed(strip_prefix="0."), ignore_unexpected=["^1"], strict=True)
    assert type(renamed[0].extra) is type(value)


def test_modules_do_not_share_what_a_file_holds(tmp_path: Path) -> None:
    torch.save(pair([1]).state_dict(), tmp_path / "model.bin")
    checkpoint = Checkpoint.open(tmp_path / "model.bin")
    one, other = empty(), empty()
    load(one, checkpoint)
    one[0].extra.append(2)
    load(other, checkpoint)
    assert other[0].extra == [1]


def test_tensors_within_plain_values_are_refused_by_name_where_a_module_would_get_them(tmp_path: Path) -> None:
    torch.save(pair({"scale": [torch.ones(1)]}).state_dict(), tmp_path / "model.bin")
    with pytest.raises(MatchError, match=r"model\.bin: '0\._extra_state' is a dict with tensors in it, which is not read"):
        load_checkpoint_in_model(empty(), tmp_path / "model.bin")
    plain = nn.Sequential(nn.ModuleDict({"linear": nn.Linear(2, 3)}), nn.ModuleDict({"linear": nn.Linear(2, 3)}))
    load_checkpoint_in_model(plain, tmp_path / "model.bin")
