"""Ctrl-C in the middle of a load: it returns at once, the model is on meta, and no file is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.constants import MiB
from bigmodel.loading import Checkpoint, init_empty_weights, load, load_checkpoint_in_model, reader

LAYERS = 40


def empty(dtype: torch.dtype) -> nn.Module:
    with init_empty_weights():
        return nn.ModuleList(nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(LAYERS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    save_file({f"{n}.weight": torch.full((1024, 1024), float(n)) for n in range(LAYERS)}, tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_disk", [False, True])
def test_ctrl_c(folder: Path, dtype: torch.dtype, on_disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = read_bytes = 0
    real = os.preadv
    begun, released = threading.Event(), threading.Event()

    def slow(*arguments: object) -> int:
        nonlocal reads, read_bytes
        reads += 1
        begun.set()
        released.wait(100)
        count = real(*arguments)  # type: ignore[arg-type]
        read_bytes += count
        return count

    def interrupt() -> None:
        begun.wait(100)
        os.kill(os.getpid(), signal.SIGINT)

    class Watched(reader.Crew):
        def stop(self) -> None:
            self.stopped = True
            released.set()  # the reads go on when the main thread has heard of it, not before
            super().stop()

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(reader, "Crew", Watched)
    device_map = {"": "cpu", "0": "disk"}

    def run(model: nn.Module) -> None:
        if on_disk:
            load_checkpoint_in_model(model, folder, device_map=device_map, offload_folder=folder.parent / "offload", dtype=dtype)
        else:
            load(model, Checkpoint.open(folder), progress=False)

    before = sorted(path for path in folder.parent.rglob("*"))
    model = empty(dtype)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(model)
    thread.join()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sorted(path for path in folder.parent.rglob("*")) == before
    assert read_bytes <= 64 * MiB  # what was under way, not the rest of 160 MiB
    count = reads
    time.sleep(0.2)
    assert reads == count  # nobody reads on behind the caller's back
    monkeypatch.setattr(os, "preadv", real)
    load(model, Checkpoint.open(folder), progress=False)
    assert torch.equal(model[7].weight, torch.full((1024, 1024), 7.0, dtype=dtype))
