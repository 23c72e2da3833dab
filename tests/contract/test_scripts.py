"""Scripts written against accelerate, run with nothing but their imports changed. They hold under both libraries."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script(script, tmp_path, monkeypatch):
    text, changed = re.subn(r"^(from|import) accelerate\b", r"\1 bigmodel", script.read_text(), flags=re.MULTILINE)
    assert changed
    assert not re.search(r"^(from|import) accelerate\b|accelerate\.", text, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / script.name
    file.write_text(text)
    runpy.run_path(str(file), run_name="__main__")
