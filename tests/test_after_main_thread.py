"""What the main thread leaves to other threads, and to `atexit`: Python's pools of threads take nothing any more then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = """
import atexit, sys, threading, torch
{early}
import bigmodel
from torch import nn

def empty():
    with bigmodel.init_empty_weights():
        return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])

def serve():
    threading.main_thread().join() if threading.current_thread() is not threading.main_thread() else None
    with torch.no_grad():
        for model in (offloaded, bigmodel.load_checkpoint_and_dispatch(empty(), sys.argv[1], {{"": "disk"}}, dtype="bfloat16")):
            x = torch.ones(1, 512, dtype=model[0].weight.dtype)
            print(model(x)[0, 0].item(), model(x)[0, 0].item())
        print(bigmodel.load_checkpoint_and_dispatch(empty(), sys.argv[1], {{"": "cpu"}})[3].weight[0, 0].item())
        packed = bigmodel.load_checkpoint_and_dispatch(empty(), sys.argv[1], {{"": "cpu"}}, quantization="fp8")
        print(round(packed(torch.ones(1, 512))[0, 0].item(), 3))

offloaded = bigmodel.load_checkpoint_and_dispatch(empty(), sys.argv[1], {{"": "disk"}}, dtype="float32")
{warm}
{late}
"""


@pytest.mark.parametrize("warm", ["", "offloaded(torch.ones(1, 512))"])
@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("", "threading.Thread(target=serve).start()"),
        ("", "atexit.register(serve)"),
        ("atexit.register(lambda: serve())", ""),
    ],
    ids=["thread", "atexit", "atexit-before-import"],
)
def test_loading_and_forwards_go_on(tmp_path: Path, early: str, late: str, warm: str) -> None:
    save_file({f"{n}.weight": torch.full((512, 512), 1 / 512) for n in range(4)}, tmp_path / "model.safetensors")
    program = PROGRAM.format(early=early, late=late, warm=warm)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1.0", "1.0", "1.0", "1.0", str(1 / 512), "1.0"], done.stderr
    assert done.returncode == 0, done.stderr
