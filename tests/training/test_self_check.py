"""`bigmodel test`: a short job, launched as the config file says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bigmodel.errors import TrainingError
from bigmodel.state import AcceleratorState
from bigmodel.training import self_check

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run(folder: Path, content: str) -> tuple[int, str]:
    (folder / "config.yaml").write_text(content)
    environment = {**os.environ, "HF_HOME": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(self_check.__file__).parents[2]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bigmodel", "test", "--config_file", str(folder / "config.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_two_processes_meet_gather_and_train(tmp_path: Path) -> None:
    code, output = run(tmp_path, "num_processes: 2\nuse_cpu: true\nmixed_precision: bf16")
    assert code == 0, output
    assert "2 processes (MULTI_CPU, first on cpu, mixed_precision=bf16): they meet, gather, and train one model." in output


def test_an_engine_is_told_to_be_tried_by_training(tmp_path: Path) -> None:
    code, output = run(tmp_path, "num_processes: 2\nuse_cpu: true\ndistributed_type: FSDP\nfsdp_config: {fsdp_version: 2}")
    assert code == 0, output
    assert "they meet and gather; what FSDP is set to is tried by training." in output


def test_a_file_that_cannot_be_is_one_message(tmp_path: Path) -> None:
    code, output = run(tmp_path, "num_procs: 2")
    assert code == 1
    assert "bigmodel knows no key 'num_procs'" in output


def test_one_process_learns_a_line() -> None:
    assert self_check.check() == "1 process (NO, first on cpu, mixed_precision=no): they meet, gather, and train one model."


def test_copies_that_differ_and_losses_that_rise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_train", lambda accelerator: ([1.0, 0.5], torch.tensor([[1.0, 2.0], [1.0, 3.0]])))
    with pytest.raises(TrainingError, match=r"copies of a model differ after training: \[\[1.0, 2.0\], \[1.0, 3.0\]\]"):
        self_check.check()
    monkeypatch.setattr(self_check, "_train", lambda accelerator: ([1.0, 1.5], torch.tensor([[1.0, 2.0]])))
    with pytest.raises(TrainingError, match=r"did not fall: \[1.0, 1.5\]"):
        self_check.check()
