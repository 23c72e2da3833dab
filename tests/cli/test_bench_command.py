"""`bigmodel bench`: a table for people, JSON for programs, and figures that plans find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from bigmodel.cli.main import main
from bigmodel.machine import DeviceRates, Machine, Matmul, Rate
from bigmodel.measuring import kept_machine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """What a measurement gives, without measuring; the folder that it was asked for is checked by each test."""
    rate = Rate(2e9, "measured", 1e-5)
    cpu = DeviceRates("a processor", 1 << 34, rate, (Matmul("float32", 1, 1e10, "measured"),), rate, 1e-6, queues=False)
    made = Machine({"cpu": cpu}, Rate(3e9, "guess"), rate, rate, rate, 4, 2, 4)
    monkeypatch.setenv("BIGMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("bigmodel.cli.bench.measure_machine", lambda folder: made)
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


def test_a_table_and_a_file(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench")
    assert code == 0
    for expected in ("3 (guess)", "page cache", "10.0 µs", "a processor", "float32"):
        assert expected in out
    assert kept_machine() == machine


def test_json_is_the_machine(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--json")
    assert code == 0
    assert Machine.from_json(out) == machine


def test_figures_need_not_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "bench", "--no-keep")[0] == 0
    assert kept_machine() is None


def test_figures_that_cannot_be_kept_are_shown_before_the_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    code, out, error = run(capsys, "bench")
    assert code == 1
    assert "page cache" in out
    assert "BIGMODEL_CACHE" in error


def test_plans_use_what_was_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"layers.{index}.weight": zeros(64, 64) for index in range(8)}, file)
    arguments = ("plan", file, "--max-memory", "cpu=80KiB", "--json")
    assert json.loads(run(capsys, *arguments)[1])["prediction"] is None
    run(capsys, "bench")
    assert json.loads(run(capsys, *arguments)[1])["prediction"]["decode_seconds"] > 0
