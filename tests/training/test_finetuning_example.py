"""examples/finetune_minilm.py: however it is run, its losses are those of one process."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import Processes
from safetensors.torch import load_file

from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.parallel import load

pytestmark = pytest.mark.xdist_group("processes")

Sizes = Callable[[int], Processes]
SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_minilm.py"
SHORT = ["--batches", "4", "--batch-size", "4", "--pairs", "12", "--learning-rate", "1e-4"]
HALF = ["--accumulate", "2", "--mixed-precision", "bf16"]


def losses_of(*arguments: str) -> list[float]:
    """The script's losses, in this process."""
    os.environ["BIGMODEL_USE_CPU"] = "1"
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found: list[float] = script.main([*SHORT, *arguments])
    return found


alone = functools.cache(losses_of)


def assert_close(found: list[float], expected: list[float], tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)


def test_launched_with_copies_stopped_and_resumed(processes: Sizes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = ["launch", "--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "1", str(SCRIPT), *SHORT]
    stop = ["--stop-after", "2", "--checkpoint", str(state)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-m", "bigmodel", *command, *stop], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    first = load(state / "custom_checkpoint_0.pkl")["losses"]
    assert len(first) == 2
    for losses in processes(2).run(losses_of, "--resume", "--checkpoint", str(state), timeout=200):
        assert losses[:2] == first
        assert_close(losses, alone(), 1e-4)


def test_sharded(processes: Sizes, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for losses in processes(2).run(losses_of, "--spread", "fsdp", "--output", str(folder), timeout=200):
        assert_close(losses, alone(), 1e-4)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    weights = load_file(folder / "model.safetensors")
    assert weights["encoder.layer.5.output.dense.weight"].shape == (384, 1536)


def test_sharded_in_half_precision_with_accumulation(processes: Sizes) -> None:
    for losses in processes(2).run(losses_of, "--spread", "fsdp", *HALF, timeout=200):
        assert_close(losses, alone("--accumulate", "2"), 0.05)
        assert losses != alone("--accumulate", "2")


def test_with_deepspeed(processes: Sizes, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    for losses in processes(2).run(losses_of, "--spread", "deepspeed", "--accumulate", "2", "--output", str(tmp_path), timeout=200):
        assert_close(losses, alone("--accumulate", "2"), 1e-4)
    assert load_file(tmp_path / "model.safetensors")["encoder.layer.5.output.dense.weight"].shape == (384, 1536)
