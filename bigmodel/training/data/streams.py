"""Streams of samples shared out between processes, each of which reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ...errors import TrainingError
from .rows import row_count

__all__ = ["CountingCollate", "IterableDatasetShard"]


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, out of a stream that every process reads.

    The stream is read in pieces of one batch for each process (of one batch for all, with `split_batches`), of which process `r` has the
    `r`-th part. A last piece that is short is filled with samples from the start of the stream, over and over where there are too few; with
    `drop_last` it is dropped.

    Args:
        dataset: gives the same samples in the same order on every process. One with a `generator` and no `set_epoch` has it seeded with
            the number of the epoch.
        batch_size: samples of a batch; None: every element of the stream is a batch.
        drop_last: drop the last piece where it is short.
        num_processes, process_index: among how many processes, and which one this is.
        split_batches: `batch_size` is that of all processes together.

    Attributes:
        real_samples: while the piece is handed out that repeats samples, how many of all processes together are no repeats (-1 if that
            cannot be told); otherwise 0.

    Raises:
        TrainingError: a batch size to be cut that does not go into `num_processes` parts.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ):
        if not 0 <= process_index < num_processes:
            raise TrainingError(f"There is no process {process_index} among {num_processes}.")
        if split_batches and (not batch_size or batch_size % num_processes):
            raise TrainingError(
                f"Batches of {batch_size} samples cannot be cut into {num_processes} equal parts, as `split_batches` asks for: "
                "choose a batch size that is a multiple of the number of processes."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.real_samples = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration reads, told to the dataset too where it can be."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _piece(self) -> int:
        """Elements of the stream that all processes have together at one step."""
        return (self.batch_size or 1) * (1 if self.split_batches else self.num_processes)

    def __len__(self) -> int:
        samples = len(self.dataset)  # type: ignore[arg-type]
        if self.num_processes == 1:
            return samples
        pieces = samples // self._piece if self.drop_last else -(-samples // self._piece)
        return pieces * (self._piece // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        self.real_samples = 0
        return iter(self.dataset) if self.num_processes == 1 else self._share(iter(self.dataset))

    def _share(self, stream: Iterator[Any]) -> Iterator[Any]:
        each = self._piece // self.num_processes
        mine = slice(each * self.process_index, each * (self.process_index + 1))
        first: list[Any] = []
        while len(piece := list(islice(stream, self._piece))) == self._piece:
            if not self.drop_last:
                first = first or piece
            yield from piece[mine]
        if piece and not self.drop_last:
            self.real_samples = len(piece) if self.batch_size else _samples(piece)
            piece += islice(cycle(first or list(piece)), self._piece - len(piece))
            yield from piece[mine]


def _samples(batches: list[Any]) -> int:
    counts = [row_count(batch) for batch in batches]
    return -1 if None in counts else sum(count for count in counts if count is not None)


class CountingCollate:
    """A `collate_fn` that gives, with each batch of an `IterableDatasetShard`, the shard's `real_samples`.

    The shard that knows may be a copy in a worker process, which gets shard and collate function together; so the number travels with
    the batch.
    """

    def __init__(self, collate: Callable[[Any], Any], shard: IterableDatasetShard):
        self.collate = collate
        self.shard = shard

    def __call__(self, samples: Any) -> tuple[Any, int]:
        return self.collate(samples), self.shard.real_samples
