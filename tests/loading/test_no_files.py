"""Pipes, sockets and devices in the place of a checkpoint's file are called so at once: nothing waits for somebody who writes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, load, load_state_dict

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf", "model.safetensors.index.json"])
def test_a_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for where in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match=rf"{name}: is a pipe, not a file\..*write them into one first"):
            Checkpoint.open(where)
    with pytest.raises(CheckpointError, match="is a pipe"):
        load_state_dict(tmp_path / name)


def test_a_socket_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("model.safetensors")
        with pytest.raises(CheckpointError, match="is a socket, not a file"):
            Checkpoint.open("model.safetensors")
    with pytest.raises(CheckpointError, match="/dev/zero: is a device, not a file"):
        Checkpoint.open("/dev/zero")


def test_a_pipe_that_an_index_names(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: is a pipe"):
        Checkpoint.open(tmp_path)


def test_a_pipe_that_takes_the_place_of_a_file_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, file)
    opened = Checkpoint.open(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="the file has changed since it was opened"):
        load(nn.Linear(2, 2), opened)
