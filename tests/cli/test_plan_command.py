"""`bigmodel plan`: models described in every way, budgets by option, one message for an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.cli.budgets import joined_budgets
from bigmodel.cli.main import main
from bigmodel.constants import GiB, MiB
from bigmodel.errors import PlanError
from bigmodel.planning import Plan


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({f"layers.{index}.weight": torch.zeros(256, 256, dtype=torch.float16) for index in range(16)}, file)  # 2 MiB
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


def test_cards_and_ram_are_options(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", checkpoint, "--gpu", "0.5MiB", "--gpu", "RTX 4090", "--cpu", "1GiB", "--json")
    assert code == 0
    made = Plan.from_json(out)
    assert {use.device: use.budget_bytes for use in made.devices} == {0: MiB // 2, 1: int(0.9 * 24 * GiB), "cpu": GiB}
    assert "RTX 4090" in " ".join(made.notes)


def test_the_table_says_what_would_help(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "plan", checkpoint, "--gpu", "1MiB", "--cpu", "1GiB", "--disk", "1GiB")
    assert (code, error) == (0, "")
    assert "What would help:" in out
    assert "4-bit weights (nf4)" in out
    assert max(map(len, out.splitlines())) <= 100


def test_packed_formats_context_and_batch_are_options(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "plan", checkpoint, "--gpu", "1GiB", "--dtype", "nf4", "--context", 128, "--batch", 2, "--logits", "last", "--json"
    )
    assert code == 0
    made = Plan.from_json(out)
    assert (made.weight_format, made.context, made.batch) == ("nf4", 128, 2)
    assert made.total_bytes < 16 * 256 * 256


def test_what_inspect_prints_can_be_planned(checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", "num_hidden_layers": 16}))
    _, dump, _ = run(capsys, "inspect", tmp_path, "--json")
    assert json.loads(dump)["config"]["num_hidden_layers"] == 16
    (tmp_path / "elsewhere.json").write_text(dump)
    checkpoint.unlink()
    code, out, _ = run(capsys, "plan", tmp_path / "elsewhere.json", "--gpu", "1MiB", "--cpu", "1GiB", "--json")
    assert code == 0
    assert Plan.from_json(out).total_bytes == 2 * MiB


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "lots"], "Budget of device 0: 'lots' is no size"),
        (["--gpu", "1GiB", "--max-memory", "0=2GiB"], "both say something about device 0"),
        (["--cpu", "1GiB", "--max-memory", "cpu=2GiB"], "--max-memory and --cpu both"),
        (["--max-memory", "0=1GiB,0=2GiB"], "twice"),
        (["--gpu", "1GiB", "--dtype", "nf5"], "'nf5'"),
        (["--gpu", "1GiB", "--objective", "speed"], "'speed'"),
        (["--gpu", "1KiB", "--cpu", "1KiB", "--disk", "1KiB"], "no room"),
    ],
)
def test_errors_are_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, error = run(capsys, "plan", checkpoint, *arguments)
    assert (code, out) == (1, "")
    assert said in error
    assert error.count("\n") == 1
    assert error.startswith("Error: ")


def test_a_model_that_is_nowhere_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, "plan", tmp_path / "nowhere", "--gpu", "1GiB")
    assert code == 1
    assert "nowhere" in error
    (tmp_path / "broken.json").write_text("{")
    code, _, error = run(capsys, "plan", tmp_path / "broken.json", "--gpu", "1GiB")
    assert code == 1
    assert "broken.json: cannot be read as a header dump" in error


def test_options_are_joined() -> None:
    assert joined_budgets(None, [], None, None) is None
    assert joined_budgets("cpu=5,disk=7", ["24GiB"], None, None) == {0: "24GiB", "cpu": 5, "disk": 7}
    assert joined_budgets(None, ["24GiB", "100"], "1GB", "2GB") == {0: "24GiB", 1: 100, "cpu": "1GB", "disk": "2GB"}
    with pytest.raises(PlanError, match="numbered from 0 on, 2 of them"):
        joined_budgets("1=5", ["1", "2"], None, None)
