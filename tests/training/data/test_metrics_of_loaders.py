"""What `gather_for_metrics` makes of loaders whose batches differ in size: every sample once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from processes import Processes
from torch.utils.data import DataLoader

from bigmodel.training.accelerator import Accelerator

pytestmark = pytest.mark.xdist_group("processes")


class Batches:
    """A batch sampler of these batches, with a size to go by or none."""

    def __init__(self, batches: list[list[int]], batch_size: int | None):
        self.batches = batches
        if batch_size is not None:
            self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


CASES = [
    ([[0, 1], [2, 3], [4]], None),
    ([[0, 1], [2, 3], [4]], 2),
    ([[0, 1, 2], [3, 4, 5], [6, 7]], None),
    ([[0, 1, 2], [3, 4, 5], [6]], 3),
    ([[0, 1, 2]], None),
]


def gathered() -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    results = []
    for batches, size in CASES:
        loader = accelerator.prepare(DataLoader(range(9), batch_sampler=Batches(batches, size)))
        results.append([sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()])
    return results


def test_every_sample_counts_once(processes: Callable[[int], Processes]) -> None:
    for results in processes(2).run(gathered):
        assert results == [[sample for batch in batches for sample in batch] for batches, _ in CASES]
