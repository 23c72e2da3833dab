"""Random models under random maps, ring sizes, modes, threads and failures. `benchmarks/stress.py` runs thousands of the same cases."""

from __future__ import annotations

import pytest
from random_cases import one_case

import bigmodel.dispatch.group as group
import bigmodel.dispatch.schedule as schedule


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_cases_on_cpu(tmp_path, monkeypatch, start):
    monkeypatch.setattr(schedule, "_AHEAD_BYTES", 0)
    monkeypatch.setattr(group, "SMALL_BYTES", 0)
    for seed in range(start, start + 20):
        one_case(seed, tmp_path / str(seed), [])


@pytest.mark.parametrize("start", range(1000, 1060, 20))
def test_random_cases_on_accelerators(tmp_path, accelerators, start):
    devices = accelerators(2, memory="32MiB")
    for seed in range(start, start + 20):
        one_case(seed, tmp_path / str(seed), devices)
