"""Things in the place of paths, maps, checkpoints and tensors: each is named, with what to give instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigmodel
from bigmodel.cli.main import main
from bigmodel.errors import CheckpointError, MatchError, PlanError
from bigmodel.loading import Checkpoint, init_empty_weights, load, load_checkpoint_in_model, load_state_dict, save_model


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), {"": "cpu"}])
def test_one_device_is_a_map(saved: Path, tied: Callable[[], nn.Module], filled: nn.Module, device: Any) -> None:
    with init_empty_weights():
        model = tied()
    load_checkpoint_in_model(model, saved, device_map=device)
    assert torch.equal(model.get_parameter("embed.weight"), filled.get_parameter("embed.weight"))


@pytest.mark.parametrize(
    ("device_map", "story"), [("auto", "this call finds no map"), ([1], r"\[1\], not a mapping"), ("gpuu", "'gpuu' is not a device")]
)
def test_what_is_no_map(saved: Path, tied: Callable[[], nn.Module], device_map: Any, story: str) -> None:
    with init_empty_weights():
        model = tied()
    with pytest.raises(PlanError, match=story):
        load_checkpoint_in_model(model, saved, device_map=device_map)


@pytest.mark.parametrize("where", [b"model.safetensors", None, {"a": 1}, 3])
@pytest.mark.parametrize("call", [Checkpoint.open, load_state_dict, lambda where: load_checkpoint_in_model(nn.Linear(1, 1), where)])
def test_what_is_no_path(call: Callable[[Any], Any], where: Any) -> None:
    with pytest.raises(CheckpointError, match=r"names no checkpoint\. Give a path"):
        call(where)


def test_an_open_checkpoint_is_no_path_and_a_path_no_open_checkpoint(saved: Path, filled: nn.Module) -> None:
    with pytest.raises(CheckpointError, match=r"a Checkpoint names no checkpoint\. Give a path"):
        load_checkpoint_in_model(filled, Checkpoint.open(saved))  # type: ignore[arg-type]
    for call in (load, bigmodel.load_and_dispatch):
        with pytest.raises(CheckpointError, match=r"a str is no open checkpoint: give bigmodel\.Checkpoint\.open\('m\.safetensors'\)"):
            call(filled, "m.safetensors")  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    ("content", "story"),
    [
        (b"", "the file is empty"),
        (b"<html>no</html>", "a web page"),
        (b"\x93garbage" * 30, "cannot read it"),
        (b"PK\x03\x04cut", "truncated"),
    ],
)
def test_state_dicts_that_are_none(tmp_path: Path, content: bytes, story: str) -> None:
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.bin: .*{story}"):
        load_state_dict(tmp_path / "m.bin")


class Holding(nn.Module):
    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"b{number}", tensor)


STRANGE = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense(tmp_path: Path, kind: str, safe: bool) -> None:
    with pytest.raises(CheckpointError, match=f"'b1' is a {kind} tensor; files hold dense ones alone"):
        save_model(Holding(torch.ones(1), STRANGE[kind]()), tmp_path / "new", safe_serialization=safe)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_views_that_read_memory_otherwise_are_saved_as_what_they_are(tmp_path: Path, safe: bool) -> None:
    base = torch.randn(4, dtype=torch.complex64)
    tensors = [base, base.conj(), base.conj().imag, base.real, base.imag]
    save_model(Holding(*tensors), tmp_path, safe_serialization=safe)
    model = Holding(*(torch.zeros(4, dtype=tensor.dtype) for tensor in tensors))
    load_checkpoint_in_model(model, tmp_path, strict=True)
    for number, tensor in enumerate(tensors):
        assert torch.equal(model.get_buffer(f"b{number}"), tensor.resolve_conj().resolve_neg()), number


def test_lazy_modules(saved: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(CheckpointError, match=r"'0\.weight' has no shape yet"):
        save_model(model, tmp_path / "new")
    with pytest.raises(MatchError, match=r"0\.weight, 0\.bias of the model have no shape yet"):
        load_checkpoint_in_model(model, saved)


def test_offload_folders_of_models_that_are_called_the_same(tmp_path: Path) -> None:
    bigmodel.disk_offload(nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointError, match=r"another model \(tensors of other names or shapes: Linear from"):
        bigmodel.disk_offload(nn.Linear(3, 3), tmp_path)


@pytest.mark.parametrize("arguments", [["inspect", "gone", "--json"], ["load", "gone", "--check", "--json"]])
def test_commands_that_fail_say_so_as_json(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["error"].startswith("gone: there is no such file")
    assert "gone: there is no such file" in told.err
