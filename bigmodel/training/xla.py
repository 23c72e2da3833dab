"""PyTorch/XLA, which drives TPUs, into a notebook of Google Colaboratory."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.version import Version

from ..errors import TrainingError

__all__ = ["install_xla"]


def install_xla(upgrade: bool = False) -> None:
    """Installs the `torch_xla` that belongs to the installed torch, with the TPU library; with `upgrade`, the newest torch first.

    `torch_xla` has the version numbers of the torch that it is built for, see <https://pypi.org/project/torch-xla/>. Raises `TrainingError`
    outside of Google Colaboratory, whose machines have what it runs on, and where pip fails, which says why on the screen.
    """
    if "google.colab" not in sys.modules:  # its notebooks import this before anything else
        raise TrainingError(
            "install_xla works in notebooks of Google Colaboratory only. Elsewhere: pip install 'torch_xla[tpu]', in the version of torch."
        )
    if upgrade:
        _pip_install("--upgrade", "torch")
    # Not torch.__version__: once upgraded, that is still the version of before.
    release = Version(importlib.metadata.version("torch")).release
    _pip_install(f"torch_xla[tpu]~={release[0]}.{release[1]}.0")


def _pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", *arguments]
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise TrainingError(f"{' '.join(command)} failed (exit status {error.returncode}); nothing after it was installed.") from error
