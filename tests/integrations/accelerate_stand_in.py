"""A distribution named accelerate, of which every module is bigmodel's: what transformers finds when it looks for its training library.

It exists for tests alone, in a temporary folder that subprocesses have on their path. bigmodel installs nothing under another name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bigmodel.utils import get_free_port

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


def run_over_stand_in(folder: Path, script: Path, *arguments: str, processes: int = 1, timeout: float = 200) -> list[Any]:
    """Runs `script` in processes that take the stand-in in `folder` for accelerate, in one group where there are several.

    Returns what each has printed last, which is JSON.

    Raises:
        AssertionError: one failed; with all that it wrote.
    """
    path = os.pathsep.join(map(str, [folder, REPOSITORY, Path(__file__).parent]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    if processes > 1:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= meeting | {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        command = [sys.executable, str(script), *arguments]
        started.append(subprocess.Popen(command, env=environment | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        written = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, written, strict=True):
        assert process.returncode == 0, f"{script.name} ended with {process.returncode}.\n{text}"
    return [json.loads(text.rstrip().splitlines()[-1]) for text in written]
