"""A measurement that takes no time: everything small, everything once. The figures mean nothing; that they are there does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

MiB = 1 << 20


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Small sizes, and a cache folder of the test's own, which it returns."""
    sizes = {
        "disk": {"SCRATCH_BYTES": 16 * MiB, "WARM_READS": 1, "COLD_READS": 1},
        "links": {"COPY_BYTES": MiB},
        "arithmetic": {
            "SHAPE": (176, 64),
            "ACCELERATOR_SHAPE": (176, 64),
            "BLOCK_RUNS": 2,
            "ROWS": (1, 4),
            "BLOCK_WIDTH": 64,
            "BLOCK_ROWS": 4,
        },
        "timing": {"ENOUGH_SECONDS": 0.0},
    }
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(importlib.import_module(f"bigmodel.measuring.{module}"), name, value)
    folder = tmp_path / "cache"
    monkeypatch.setenv("BIGMODEL_CACHE", str(folder))
    return folder
