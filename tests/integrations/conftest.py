"""Checkpoints of tiny transformers models, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_transformers


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of the family's checkpoint, as transformers saves it: sharded, experts one by one."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tiny_transformers.save(tiny_transformers.make(name), tmp_path_factory.mktemp(name))
        return folders[name]

    return folder
