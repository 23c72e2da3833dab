"""What `install_xla` asks pip for; nothing is installed here."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from typing import Any

import pytest

from bigmodel.errors import TrainingError
from bigmodel.training.xla import install_xla

PIP = [sys.executable, "-m", "pip", "install"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was run, in a notebook with torch 2.8.1 where an upgrade brings 2.9.0."""
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        assert check
        ran.append(command)

    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.9.0+cu126" if [*PIP, "--upgrade", "torch"] in ran else "2.8.1+cu126")
    return ran


def test_the_wheel_belongs_to_the_installed_torch(commands: list[list[str]]) -> None:
    install_xla()
    assert commands == [[*PIP, "torch_xla[tpu]~=2.8.0"]]


def test_an_upgrade_brings_torch_first(commands: list[list[str]]) -> None:
    install_xla(upgrade=True)
    assert commands == [[*PIP, "--upgrade", "torch"], [*PIP, "torch_xla[tpu]~=2.9.0"]]


def test_a_failure_of_pip_says_which_command_failed(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], check: bool) -> Any:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(TrainingError, match=r"torch_xla\[tpu\]~=2\.8\.0 failed \(exit status 1\)"):
        install_xla()


def test_elsewhere_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    with pytest.raises(TrainingError, match="Google Colaboratory only"):
        install_xla(upgrade=True)
