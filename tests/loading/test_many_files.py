"""Checkpoints of more files than a process may have open: it allows itself more where it can, and says what to do where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

FILES = 60
PROGRAM = """
import os, sys, resource, torch, bigmodel
from torch import nn
folder, soft, hard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def empty():
    with bigmodel.init_empty_weights():
        return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range({files})])

x = torch.ones(1, 64)
bigmodel.load_checkpoint_and_dispatch(empty(), folder, {{"": "cpu", "0": "disk"}})(x)  # whatever is imported late
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (before + soft, before + hard))
for device_map in ({{"": "cpu"}}, {{"": "disk"}}, {{"": "cpu", "3": "disk"}}):
    model = empty()
    try:
        bigmodel.load_checkpoint_and_dispatch(model, folder, device_map)
        with torch.no_grad():
            print(model(x).tolist() == [[1.0] * 64])
    except bigmodel.BigModelError as error:
        print(all(parameter.is_meta for parameter in model.parameters()), "ulimit -n" in str(error) and ".safetensors" in str(error))
    del model
"""


def run(folder: Path, soft: int, hard: int) -> list[str]:
    program = PROGRAM.format(files=FILES)
    arguments = [sys.executable, "-W", "ignore", "-c", program, str(folder), str(soft), str(hard)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n in range(FILES):
        save_file({f"{n}.weight": torch.eye(64)}, tmp_path / f"model-{n + 1:05}-of-{FILES:05}.safetensors")
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
class TestManyFiles:
    def test_one_descriptor_a_file_is_enough(self, folder: Path) -> None:
        assert run(folder, FILES + 15, FILES + 15) == ["True"] * 3

    def test_the_process_allows_itself_more(self, folder: Path) -> None:
        assert run(folder, 30, 1000) == ["True"] * 3

    def test_where_it_may_not_the_error_says_what_to_do_and_the_model_is_unchanged(self, folder: Path) -> None:
        assert run(folder, 30, 30) == ["True True"] * 3
