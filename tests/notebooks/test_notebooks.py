"""Every notebook runs from top to bottom in a fresh kernel, and what the repository keeps of its outputs is real and small."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KEPT_BYTES = 200_000

sys.path.insert(0, str(ROOT / "notebooks"))

from execute import executed  # noqa: E402


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(output.get("text") or str(output.get("data", {}).get("text/html", "")) for output in outputs(notebook))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fresh = executed(Path(shutil.copy(file, tmp_path)))
    assert not [output for output in outputs(fresh) if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_kept_outputs_are_of_a_whole_run_and_small(file: Path) -> None:
    kept = nbformat.read(file, as_version=4)
    nbformat.validate(kept)
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert file.stat().st_size <= KEPT_BYTES
    assert not [output for output in outputs(kept) if output.output_type == "error" or output.get("name") == "stderr"]


def test_planning_shows_tables_and_pictures() -> None:
    kept = nbformat.read(ROOT / "notebooks" / "planning.ipynb", as_version=4)
    shown = text_of(kept)
    for said in (
        "What would help:",
        "BertModel: 86.65 MiB",
        "LlamaForCausalLM: 131.4 GiB",
        "DeepseekV3ForCausalLM: 1912.1 GiB",
        "Expected",
    ):
        assert said in shown
    assert sum("image/png" in output.get("data", {}) for output in outputs(kept)) >= 3


def test_offloading_shows_that_reading_hides_behind_arithmetic() -> None:
    kept = nbformat.read(ROOT / "notebooks" / "offloading.ipynb", as_version=4)
    shown = text_of(kept)
    for said in (
        "x the resident forward",
        "of the time while a block computed",
        "model.layers.11",
        "(cpu:resident)",
        "MiB per step become",
    ):
        assert said in shown
    assert any("image/png" in output.get("data", {}) for output in outputs(kept))
