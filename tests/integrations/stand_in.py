"""A distribution named accelerate, of which every module is bigmodel's: what transformers finds when it looks for its training library.

It exists for tests alone, in a temporary folder that subprocesses have on their path. bigmodel installs nothing under another name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

PACKAGE = '''
import importlib.abc
import importlib.machinery
import importlib.util
import sys

import bigmodel


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `accelerate.x.y` where there is a `bigmodel.x.y`, and hands out the very same module."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("accelerate.") or importlib.util.find_spec(self.own(name)) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def own(self, name):
        return "bigmodel" + name.removeprefix("accelerate")

    def exec_module(self, module):
        sys.modules[module.__name__] = importlib.import_module(self.own(module.__name__))


sys.meta_path.insert(0, Alias())
sys.modules["accelerate"] = bigmodel
'''

METADATA = "Metadata-Version: 2.1\nName: accelerate\nVersion: 1.15.0\n"


def write_stand_in(folder: Path) -> Path:
    """Writes package and metadata into `folder`, which is to be put on `PYTHONPATH`."""
    (folder / "accelerate").mkdir(parents=True)
    (folder / "accelerate" / "__init__.py").write_text(PACKAGE)
    (folder / "accelerate-1.15.0.dist-info").mkdir()
    (folder / "accelerate-1.15.0.dist-info" / "METADATA").write_text(METADATA)
    return folder


def run_over_stand_in(folder: Path, script: Path, *arguments: str, timeout: float = 120, **variables: str) -> str:
    """Runs `script` in a process that takes the stand-in in `folder` for accelerate. Returns what it printed.

    Raises:
        AssertionError: it failed; with all that it wrote.
    """
    path = os.pathsep.join(map(str, [folder, REPOSITORY, Path(__file__).parent]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}.\n{done.stdout}\n{done.stderr}"
    return done.stdout
