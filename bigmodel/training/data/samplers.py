"""Which samples each process sees: shuffling that a seed tells in full, and the batches of a sampler shared out between processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from ...errors import TrainingError

__all__ = ["BatchSamplerShard", "Cursor", "SeedableRandomSampler", "SkipBatchSampler", "sampler_below", "set_sampler_below"]

UNKNOWN = -1
"""A count of samples that nobody can tell."""


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is told by a seed and the number of the epoch alone: the same on every process, whatever else was drawn.

    Args:
        data_source, replacement, num_samples: as for `torch.utils.data.RandomSampler`.
        generator: gives its initial seed; nothing is drawn from it.
        data_seed: the seed; None: the generator's, and without one that of torch.

    Attributes:
        initial_seed: epoch `e` is shuffled by a generator seeded with `initial_seed + e`.
        epoch: the epoch that the next iteration shuffles; goes up by one at the end of each.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ):
        super().__init__(data_source, replacement, num_samples, torch.Generator())
        if data_seed is None:
            data_seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self.initial_seed = data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        assert self.generator is not None
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration shuffles."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of one process, out of those that a batch sampler gives for all.

    Without `split_batches`, the batches of the sampler go round: of each `num_processes` in a row, process `r` has the `r`-th. With it,
    every batch is cut into equal pieces, one a process. What all processes have at one step, in the order of the processes, are so always
    samples that follow each other.

    With `even_batches`, all processes see the same number of batches: what lacks at the end is taken from the start of the data, over and
    over where there is too little of it. A last batch that is short is filled, and missing batches are made of what follows. Where the
    sampler has no `batch_size`, or a batch beside the last one has another size, whole batches from the start stand for the missing
    ones. Batches of other sizes in the midst of the data are handed out as they are; cut ones are filled with samples of the first batch.

    Without `even_batches`, every sample is seen exactly once, and processes may see more or fewer batches than others.
    A sampler with `drop_last` has the batches dropped that are too few to go round.

    Args:
        batch_sampler: gives lists of indices; `batch_size` and `drop_last` are read from it. With items of another kind, each is one batch.
        num_processes, process_index: among how many processes, and which one this is.
        split_batches: cut batches instead of taking turns.
        even_batches: as many batches for each process.

    Attributes:
        real_samples: of the steps whose batches repeat samples, how many samples of all processes together are no repeats (these stand
            first, in the order of the processes); -1 where the items are no lists. Filled while iterating.

    Raises:
        TrainingError: batches to be cut whose size is not known, or does not go into `num_processes` parts.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ):
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.real_samples: dict[int, int] = {}
        if not 0 <= process_index < num_processes:
            raise TrainingError(f"There is no process {process_index} among {num_processes}.")
        if split_batches and (not self.batch_size or self.batch_size % num_processes):
            raise TrainingError(
                f"Batches of {self.batch_size} samples cannot be cut into {num_processes} equal parts, as `split_batches` asks for: "
                "choose a batch size that is a multiple of the number of processes."
            )

    @property
    def sampler(self) -> Any:
        """What chooses single samples, under the batch sampler; setting it sets it there."""
        return sampler_below(self)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        set_sampler_below(self, sampler)

    @property
    def total_length(self) -> int:
        """Batches of all processes together, before anything is repeated."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        total = self.total_length
        if self.num_processes == 1:
            return total
        if self.split_batches:
            return total - self._last_piece_is_empty()
        rounds, left = divmod(total, self.num_processes)
        if self.drop_last or not left:
            return rounds
        return rounds + (self.even_batches or self.process_index < left)

    def _last_piece_is_empty(self) -> bool:
        # Only torch's own batch sampler tells how long its last batch is.
        if self.even_batches or type(self.batch_sampler) is not BatchSampler or not self.total_length:
            return False
        samples = len(self.batch_sampler.sampler)  # type: ignore[arg-type]
        short = samples % self.batch_sampler.batch_size
        return 0 < short <= self.process_index * (self.batch_sampler.batch_size // self.num_processes) and not self.drop_last

    def __iter__(self) -> Iterator[Any]:
        self.real_samples.clear()
        if self.num_processes == 1:
            return iter(self.batch_sampler)
        return self._pieces() if self.split_batches else self._turns()

    def _pieces(self) -> Iterator[list[Any]]:
        assert self.batch_size is not None
        first: list[Any] | None = None
        for step, batch in enumerate(self.batch_sampler):
            each = max(self.batch_size // self.num_processes, -(-len(batch) // self.num_processes))
            missing = each * self.num_processes - len(batch)
            first = first or batch
            if missing and self.even_batches and batch:
                self.real_samples[step] = len(batch)
                batch = [*batch, *islice(cycle(first), missing)]
            piece = batch[each * self.process_index : each * (self.process_index + 1)]
            if piece:
                yield piece

    def _turns(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        evens = self.even_batches and not self.drop_last
        first: list[Any] | None = None
        step = 0
        while True:
            turn = list(islice(batches, self.num_processes))
            if len(turn) < self.num_processes:
                break
            if evens:
                first = first or turn
                if self._is_short(turn[-1]):
                    following = next(batches, None)
                    if following is None:
                        break
                    batches = chain([following], batches)
            yield turn[self.process_index]
            step += 1
        if evens and turn:
            real = self._samples(turn)
            turn = self._filled(turn, first or turn)
            if self._samples(turn) != real or real == UNKNOWN:
                self.real_samples[step] = real
        elif self.drop_last:
            return
        if self.process_index < len(turn):
            yield turn[self.process_index]

    def _is_short(self, batch: Any) -> bool:
        return self.batch_size is not None and len(batch) < self.batch_size

    def _filled(self, turn: list[Any], first: list[Any]) -> list[Any]:
        """A batch for each process: those of `turn`, the last one filled, then others made of the data's start."""
        missing = self.num_processes - len(turn)
        if self.batch_size is None or any(len(batch) != self.batch_size for batch in turn[:-1]):
            return [*turn, *islice(cycle(first), missing)]
        if not any(map(len, first)):
            return [*turn, *([[]] * missing)]
        start = cycle(chain.from_iterable(first))
        turn = [*turn[:-1], [*turn[-1], *islice(start, max(self.batch_size - len(turn[-1]), 0))]]
        return [*turn, *(list(islice(start, self.batch_size)) for _ in range(missing))]

    @staticmethod
    def _samples(turn: list[Any]) -> int:
        return sum(map(len, turn)) if all(hasattr(batch, "__len__") for batch in turn) else UNKNOWN


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first `skip_batches` batches, each time it is iterated; other attributes are those of `batch_sampler`."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any], skip_batches: int = 0):
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not there yet: it is being unpickled
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches before any is skipped."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(self.total_length - self.skip_batches, 0)


def sampler_below(source: Any) -> Any:
    """What chooses single samples, below `source`, which gives the indices of every batch; `source` itself where nothing is below."""
    while isinstance(source, (BatchSamplerShard, SkipBatchSampler)):
        source = source.batch_sampler
    return getattr(source, "sampler", source)


def set_sampler_below(source: Any, sampler: Any) -> Any:
    """`source` with another `sampler_below`, changed in place where there is a place; else `sampler`."""
    if isinstance(source, (BatchSamplerShard, SkipBatchSampler)):
        source.batch_sampler = set_sampler_below(source.batch_sampler, sampler)
        return source
    if not hasattr(source, "sampler"):
        return sampler
    source.sampler = sampler
    return source


class Cursor:
    """Indices whose first can be looked at before it is asked for."""

    def __init__(self, indices: Iterable[Any]):
        self.indices = indices
        self.iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Cursor:
        self.iterator = iter(self.indices)
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def look(self) -> None:
        """Whatever the first index depends on is drawn."""
        for first in self.iterator:
            self.iterator = chain((first,), self.iterator)
            return
