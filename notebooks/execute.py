"""Executes notebooks in place: `python notebooks/execute.py notebooks/planning.ipynb`.

What changes from run to run without meaning anything (times, the kernel's version) is left out, so that a difference is a difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

__all__ = ["executed"]

TIMEOUT_SECONDS = 120


def executed(file: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh run in its own folder. Raises what a cell raises."""
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(
        notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(file.parent)}}
    ).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(Path(name)), name)
