"""Every example in README and docs runs: python blocks of a page in order, in one namespace and folder; `$ bigmodel …` as commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigmodel.state import AcceleratorState

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, int]]:
    text = page.read_text()
    return [(match[1], match[2], text[: match.start()].count("\n") + 2) for match in BLOCK.finditer(text)]


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """What a page says about this process is forgotten after it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    for kind, source, line in blocks(page):
        if kind == "python":
            exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)
        else:
            for command in source.splitlines():
                run_command(command)


def run_command(line: str) -> None:
    """Lines that begin with `$ bigmodel` are run; `make` targets are CI itself, and other lines are output."""
    if not line.startswith("$ bigmodel"):
        return
    arguments = shlex.split(line.removeprefix("$ bigmodel"), comments=True)
    done = subprocess.run([sys.executable, "-m", "bigmodel", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_readme_has_examples() -> None:
    kinds = {kind for kind, _, _ in blocks(ROOT / "README.md")}
    assert kinds == {"python", "console"}
