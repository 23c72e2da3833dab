"""Saving over an earlier save: what is loaded afterwards is the one or the other, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bigmodel.errors import BigModelError, CheckpointError
from bigmodel.loading import init_empty_weights, load_checkpoint_in_model, save_model

LAYERS = 6
SHARD_BYTES = 16


def filled_with(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(LAYERS)))
    for layer in model:
        nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]
    return model


def loaded(folder: Path) -> set[float]:
    with init_empty_weights():
        model = filled_with(0.0)
    load_checkpoint_in_model(model, folder, strict=True)
    return {value for parameter in model.parameters() for value in parameter.unique().tolist()}


def listing(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


class Killed(BaseException):
    """The process is gone: nothing is done any more."""


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Calls a function with the number of the move before each rename that happens below."""

    def watch(before: Callable[[int], None]) -> None:
        count = 0

        def watched(real: Callable[..., None]) -> Callable[..., None]:
            def move(*arguments: Any, **named: Any) -> None:
                nonlocal count
                count += 1
                before(count - 1)
                real(*arguments, **named)

            return move

        monkeypatch.setattr(os, "rename", watched(os.rename))
        monkeypatch.setattr(os, "replace", watched(os.replace))

    return watch


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(
    "limits", [(SHARD_BYTES, SHARD_BYTES), (SHARD_BYTES, 2 * SHARD_BYTES), (SHARD_BYTES, 10**6), (10**6, SHARD_BYTES), (10**6, 10**6)]
)
@pytest.mark.parametrize("at", range(2 * (LAYERS + 1)))
def test_ctrl_c_among_the_moves(tmp_path: Path, moved: Callable[..., None], safe: bool, limits: tuple[int, int], at: int) -> None:
    save_model(filled_with(1.0), tmp_path, limits[0], safe_serialization=safe)
    moved(lambda number: os.kill(os.getpid(), signal.SIGINT) if number == at else None)
    try:
        files = save_model(filled_with(2.0), tmp_path, limits[1], safe_serialization=safe)
    except KeyboardInterrupt:
        pass
    else:  # fewer moves than that
        assert all(file.is_file() for file in files)
    assert loaded(tmp_path) == {2.0}
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("limits", [(SHARD_BYTES, SHARD_BYTES), (SHARD_BYTES, 2 * SHARD_BYTES), (SHARD_BYTES, 10**6), (10**6, SHARD_BYTES)])
@pytest.mark.parametrize("at", range(2 * (LAYERS + 1)))
def test_a_process_killed_among_the_moves(
    tmp_path: Path, moved: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kinds: tuple[bool, bool], limits: tuple[int, int], at: int
) -> None:
    save_model(filled_with(1.0), tmp_path, limits[0], safe_serialization=kinds[0])

    def kill(number: int) -> None:
        if number >= at:
            raise Killed

    moved(kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with contextlib.suppress(Killed):
            save_model(filled_with(2.0), tmp_path, limits[1], safe_serialization=kinds[1])
    monkeypatch.undo()
    try:
        found = loaded(tmp_path)
    except BigModelError:
        return
    assert found in ({1.0}, {2.0})


@pytest.mark.parametrize("at", range(2 * (LAYERS + 1)))
def test_an_error_among_the_moves_leaves_the_folder_as_it_was(tmp_path: Path, moved: Callable[..., None], at: int) -> None:
    save_model(filled_with(1.0), tmp_path, SHARD_BYTES)
    before = listing(tmp_path)

    def fail(number: int) -> None:
        if number == at:
            raise OSError(5, "Input/output error")

    moved(fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_model(filled_with(2.0), tmp_path, SHARD_BYTES)
    assert listing(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == before.keys()


def test_a_second_ctrl_c_leaves_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def slow(*arguments: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(*arguments, **named)

    def fetch(name: str) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return torch.ones(2, 2)

    monkeypatch.setattr(shutil, "rmtree", slow)
    with pytest.raises(KeyboardInterrupt):
        save_model(filled_with(1.0), tmp_path / "new", fetch=fetch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kinds", [(True, False), (False, True)])
@pytest.mark.parametrize("limits", [(10**6, 10**6), (SHARD_BYTES, 10**6), (10**6, SHARD_BYTES), (SHARD_BYTES, SHARD_BYTES)])
def test_files_of_the_other_format_go(tmp_path: Path, kinds: tuple[bool, bool], limits: tuple[int, int]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-best-of-5.safetensors.txt").write_text("mine")
    save_model(filled_with(1.0), tmp_path, limits[0], safe_serialization=kinds[0])
    files = save_model(filled_with(2.0), tmp_path, limits[1], safe_serialization=kinds[1])
    assert loaded(tmp_path) == {2.0}
    left = {name for name in listing(tmp_path) if not name.endswith(".index.json")} - {"config.json", "model-best-of-5.safetensors.txt"}
    assert left == {file.name for file in files}


@pytest.mark.parametrize(
    ("stranger", "safe"), [("foo.safetensors.index.json", True), ("foo.safetensors", False), ("adapter_model.safetensors", False)]
)
def test_what_would_be_loaded_instead_is_named_before_anything_is_written(tmp_path: Path, stranger: str, safe: bool) -> None:
    save_file(filled_with(1.0).state_dict(), tmp_path / stranger.removesuffix(".index.json"))
    if stranger.endswith(".index.json"):
        names = ", ".join(f'"{n}.weight": "foo.safetensors"' for n in range(LAYERS))
        (tmp_path / stranger).write_text(f'{{"weight_map": {{{names}}}}}')
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{stranger} would be loaded from it, not what is saved"):
        save_model(filled_with(2.0), tmp_path, safe_serialization=safe)
    assert listing(tmp_path) == before


def test_strangers_that_lose_stay(tmp_path: Path) -> None:
    save_file(filled_with(1.0).state_dict(), tmp_path / "adapter_model.safetensors")
    torch.save(filled_with(1.0).state_dict(), tmp_path / "optimizer.bin")
    save_model(filled_with(2.0), tmp_path)
    assert loaded(tmp_path) == {2.0}
    assert (tmp_path / "optimizer.bin").is_file()
    assert load_file(tmp_path / "adapter_model.safetensors")["0.weight"].unique().tolist() == [1.0]
