"""What `gather_for_metrics` makes of loaders whose batches differ in size: every sample once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.training.accelerator import Accelerator
from bigmodel.training.configuration import DataLoaderConfiguration

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


class Numbers(IterableDataset[int]):
    """A stream of the numbers below `count`."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


SHORT_ENDS = [
    (11, 4, {}, False),
    (7, 4, {"even_batches": False}, False),
    (8, 4, {}, False),
    (11, 4, {"split_batches": True}, False),
    (11, 4, {}, True),
    (11, 4, {"dispatch_batches": True}, False),
    (3, 4, {}, False),
]


def repeated_for_a_full_batch() -> list[list[int]]:
    """As many copies of a number as a full batch has samples, each time: what a script does with a loss that it weighs by samples."""
    results = []
    for count, size, config, stream in SHORT_ENDS:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        data: Any = Numbers(count) if stream else range(count)
        loader = accelerator.prepare(DataLoader(data, batch_size=size))
        each = size // accelerator.num_processes if config.get("split_batches") else size
        found = []
        for step, batch in enumerate(loader):
            numbers, structure = accelerator.gather_for_metrics((torch.tensor(step).repeat(each), {"own": batch}))
            assert len(numbers) == len(structure["own"])
            found += numbers.tolist()
        results.append(found)
    return results


def of_steps(count: int, together: int) -> list[int]:
    return [sample // together for sample in range(count)]


def test_what_counts_a_full_batch_is_cut_to_the_samples_of_a_short_one(processes: Callable[[int], Processes]) -> None:
    assert repeated_for_a_full_batch() == [of_steps(count, size) for count, size, *_ in SHORT_ENDS]
    for results in processes(2).run(repeated_for_a_full_batch):
        assert results == [of_steps(count, size if "split_batches" in config else 2 * size) for count, size, config, _ in SHORT_ENDS]


def test_rows_that_are_no_samples_stay() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(11), batch_size=4))
    tokens = [accelerator.gather_for_metrics(torch.ones(5 * len(batch))) for batch in loader]
    assert list(map(len, tokens)) == [20, 20, 15]
