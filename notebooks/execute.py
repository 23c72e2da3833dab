"""Executes notebooks in place: `python notebooks/execute.py notebooks/planning.ipynb`.

What changes from run to run or from machine to machine without meaning anything (times, the kernel's version, what torchao says of itself
where it is installed and transformers imports it) is left out, so that a difference is a difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

__all__ = ["executed"]

TIMEOUT_SECONDS = 120
OF_TORCHAO = ("torchao", "register_constant()")
"""Words of its warnings on a CPU: its kernels do not load, and torch deprecates how it registers its enums."""


def executed(file: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run in its own folder. Raises what a cell raises."""
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(
        notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(file.parent)}}
    ).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_of_torchao(output)]
    return notebook


def _is_of_torchao(output: nbformat.NotebookNode) -> bool:
    lines = output.text.splitlines() if output.get("name") == "stderr" else []
    return bool(lines) and all(any(words in line for words in OF_TORCHAO) for line in lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(Path(name)), name)
