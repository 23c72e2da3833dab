"""What the loaders of this room have in common: they are torch's `DataLoader`, know their last batch, and go on where they were stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...errors import TrainingError
from ..gradient_state import GradientState
from .position import LAYOUT, Draws, Position, Resumption
from .rows import short_rows
from .samplers import BatchSamplerShard, Cursor, SeedableRandomSampler, SkipBatchSampler, sampler_below, set_sampler_below
from .stateful import stateful_loader
from .streams import IterableDatasetShard
from .workers import Speaking, Told, WorkerDraws, WorkerStart

__all__ = ["END", "PreparedLoader", "get_sampler", "loader_arguments"]

logger = logging.getLogger(__name__)

END = object()
"""What `next` gives after the last batch."""

# All that a DataLoader is made of, but its dataset and what chooses samples.
KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


DRAW_FROM_TORCH = {
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    BatchSampler,
    SeedableRandomSampler,
    BatchSamplerShard,
    SkipBatchSampler,
}
"""Samplers that draw from no generator but torch's, if from any."""


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments that `loader` was made with, but those of the dataset and of what chooses samples."""
    return {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}


def get_sampler(loader: DataLoader[Any]) -> Any:
    """What chooses single samples, below any batch sampler, or whole batches where nothing is below; None where a stream is read."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    return sampler_below(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


class PreparedLoader(DataLoader[Any]):
    """A `DataLoader` of one process among several.

    Attributes:
        end_of_dataloader: whether the batch handed out last is the last one.
        remainder: where the batch handed out last repeats samples in some process, how many of those of all processes together are none:
            they stand first, in the order of the processes. 0: the last batch, and nothing in it is repeated; where one process alone has
            samples, their number if they are fewer than a full batch. -1: not the last batch, or nobody can tell.
        short_end: this process's samples in the batch handed out last and in a full one, where it is the last one and has fewer; else None.
        iteration: the epoch, from 0; goes up at the end of each.
        skip_batches: left out at the start of each epoch.
        device: where batches are put; None: they stay.
        use_stateful_dataloader: whether torchdata's loader reads.
    """

    end_of_dataloader = False
    remainder = -1
    short_end: tuple[int, int] | None = None

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None,
        skip_batches: int,
        use_stateful_dataloader: bool,
        drop_last_of_all: bool,
        non_blocking: bool,
        iteration: int,
        **arguments: Any,
    ):
        super().__init__(dataset, **arguments)
        self.device = device
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self._drop_last = drop_last_of_all
        self._non_blocking = non_blocking
        self._position = Position(iteration)
        self._workers_are_seeded = False
        self._stateful = stateful_loader(dataset, **arguments) if use_stateful_dataloader else None
        if self.batch_sampler is not None and not isinstance(dataset, IterableDataset):
            self.__dict__["sampler"] = get_sampler(self)  # torch leaves a sequential one here that nothing asks

    @property
    def gradient_state(self) -> GradientState:
        """Where the loops over loaders are known."""
        return GradientState()

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """What reads: torchdata's loader, or this one."""
        return self if self._stateful is None else self._stateful

    @property
    def iteration(self) -> int:
        """The epoch, from 0."""
        return self._position.epoch

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._position.epoch = iteration

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all processes together at one step; None where batches have no size that is known."""
        raise NotImplementedError

    @property
    def own_batch_size(self) -> int | None:
        """Samples of this process at one step; None where batches have no size that is known."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, for all processes together."""
        dataset = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        if hasattr(dataset, "total_length"):
            return int(dataset.total_length)
        return len(dataset)  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """What chooses single samples."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """`sampler` chooses single samples from the next epoch on."""
        source = set_sampler_below(self._indices, sampler)
        self.__dict__["sampler"] = source if self.batch_sampler is None else sampler

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`: told to the dataset and to all samplers that have a `set_epoch`."""
        going_on = self._position.resumption
        if going_on is not None and going_on.epoch != epoch:
            logger.warning(
                "The loader's state is of epoch %d, after %d batches; set_epoch(%d) begins that epoch instead.",
                going_on.epoch,
                going_on.batches,
                epoch,
            )
            self._position.resumption = None
        self._position.epoch = epoch
        for part in self._parts():
            tell = getattr(part, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def _parts(self) -> list[Any]:
        """Whatever the samples and their order come from, each once: the dataset, and samplers all the way down."""
        found: list[Any] = []
        asked: list[Any] = [self.dataset, self.sampler, self.batch_sampler]
        while asked:
            part = asked.pop()
            if part is None or any(part is other for other in found):
                continue
            found.append(part)
            if part is not self.dataset:
                asked += [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: taken while it is iterated, after the batch handed out last. Numbers, lists and dictionaries only.

        After the last batch of an epoch it is the start of the next one. With torchdata's loader it also has what dataset and samplers
        gave.
        """
        sampler = self.get_sampler()
        position = self._position
        in_the_midst = position.resumption is None and position.batches and not position.finished
        return {
            **position.state(),
            "generators": [generator.get_state().tolist() for generator in self.own_generators()],
            "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "torchdata": self.use_stateful_dataloader,
            "total_batch_size": self.total_batch_size,
            "workers_are_seeded": position.workers_were_seeded if in_the_midst else self._workers_are_seeded,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iteration hands out the rest of the epoch that `state_dict` was taken in, and no other batch.

        Random order is drawn again as at the start of that epoch; the default random generators are left as they are found.

        Raises:
            TrainingError: a state that is none, or of a later bigmodel, or of a loader that read or shuffled in another way, or, in the
                midst of an epoch, had other batches.
        """
        sampler = self.get_sampler()
        generators = self.own_generators()
        here = (self.use_stateful_dataloader, len(generators), isinstance(sampler, SeedableRandomSampler))
        if state_dict.get("layout") != LAYOUT:
            raise TrainingError(
                f"This state of a data loader has layout {state_dict.get('layout')!r}; this bigmodel reads layout {LAYOUT}."
            )
        there = (state_dict["torchdata"], len(state_dict["generators"]), state_dict["seed"] is not None)
        if here != there:
            words = "torchdata reads: {}, generators of its own: {}, a seedable sampler: {}"
            raise TrainingError(f"The state is of another loader ({words.format(*there)}) than this one ({words.format(*here)}).")
        if state_dict["batches"] and state_dict["total_batch_size"] != self.total_batch_size:
            raise TrainingError(
                f"The state is of the midst of an epoch, after {state_dict['batches']} batches of {state_dict['total_batch_size']} samples "
                f"of all processes together; this loader has {self.total_batch_size} at a step, and cannot tell which samples have been "
                "seen. Go on with as many processes and the same batch size, or load a state from between two epochs."
            )
        for generator, state in zip(generators, state_dict["generators"], strict=True):
            generator.set_state(torch.tensor(state, dtype=torch.uint8))
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = state_dict["seed"]
        self._workers_are_seeded = state_dict["workers_are_seeded"]
        self._position.load(state_dict)

    def own_generators(self) -> list[torch.Generator]:
        """The generators that order depends on, each once."""
        found: list[torch.Generator] = []
        for holder in [self, *self._parts(), getattr(self.dataset, "dataset", None)]:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                found.append(generator)
        return found

    def _draws_from_torch_alone(self) -> bool:
        """Whether the order of samples is drawn by what draws from torch's generators only."""
        order = self._parts() if isinstance(self.dataset, IterableDataset) else [part for part in self._parts() if part is not self.dataset]
        return all(type(part) in DRAW_FROM_TORCH for part in order)

    def _open(self) -> Iterator[Any]:
        """The batches of this process from where the epoch begins or goes on; `_position` is there."""
        position = self._position
        going_on, position.resumption = position.resumption, None
        self.end_of_dataloader = False
        self.remainder = -1
        self.short_end = None
        self.set_epoch(going_on.epoch if going_on else position.epoch)
        position.workers_were_seeded = self._workers_are_seeded
        workers = self._workers_of(going_on)
        if going_on is None:
            position.begin(position.epoch, Draws.now(self.own_generators(), self._draws_from_torch_alone()))
            position.batches = self.skip_batches
            position.workers = workers
            batches = self._batches_from(self.skip_batches, None)
        else:
            position.begin(going_on.epoch, going_on.start)
            position.batches = going_on.batches
            position.workers = workers
            batches = self._gone_on(going_on)
        self._workers_are_seeded = self.persistent_workers
        return batches

    def _tell_end(self, batch: Any, real: int) -> None:
        """`batch` is the last one, and of what all processes have in it, `real` samples are none that were repeated (see `remainder`)."""
        self.end_of_dataloader = True
        self.short_end = short_rows(batch, self.own_batch_size)
        alone = self.total_batch_size == self.own_batch_size
        self.remainder = self.short_end[0] if alone and not real and self.short_end is not None else real

    def _gone_on(self, going_on: Resumption) -> Iterator[Any]:
        outside = Draws.now([])
        going_on.start.restore(self.own_generators())
        try:
            batches = self._batches_from(going_on.batches, going_on)
            first = next(batches, END)
        finally:
            outside.restore([])
        return batches if first is END else chain((first,), batches)

    def _batches_from(self, start: int, going_on: Resumption | None) -> Iterator[Any]:
        """Batches of the dataset from number `start` on, of those that this process reads."""
        if going_on is not None and going_on.base is not None:
            assert self._stateful is not None, "torchdata's state"
            self._stateful.load_state_dict(going_on.base)
            return self._whole()
        if not start:
            return self._whole()
        if self._stateful is not None or isinstance(self.dataset, IterableDataset):
            batches = self._whole()
            self._pass_over(batches, start)
            cursor = None
        else:
            workers = self._position.workers
            first = start if workers is None else workers.start.first
            cursor = Cursor(SkipBatchSampler(self._indices, first))
            batches = self._heard(self._like_this(cursor))
            for _ in range(first, start):  # read again, so that each worker process has the part that it had
                next(batches, END)
        if going_on is not None and going_on.ahead is not None:
            # What a dataset draws for a sample is drawn as it was, now that the order is known again.
            if cursor is not None:
                cursor.look()
            torch.set_rng_state(going_on.ahead)
        return batches

    def _pass_over(self, batches: Iterator[Any], count: int) -> None:
        """Reads `count` batches that nobody asked for."""
        for _ in range(count):
            next(batches, END)

    @property
    def _indices(self) -> Any:
        """Gives the indices of every batch."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def _read_at_once(self) -> int:
        """Batches that are read for a step."""
        return 1

    def _workers_of(self, going_on: Resumption | None) -> WorkerDraws | None:
        """What the worker processes of an epoch that begins or goes on are to tell; None where nobody listens."""
        if self._reads_here() or self._stateful is not None:
            return None
        steps, start = self.skip_batches, self._position.following_workers() if self._workers_are_seeded else None
        if going_on is not None:
            steps, start = going_on.batches, going_on.workers
        usual = WorkerStart(steps * self._read_at_once, [None] * self.num_workers)
        if start is not None and len(start.states) != self.num_workers:
            logger.warning(
                "The state is of a loader with %d worker processes, and this one has %d: what its data set draws at random in them "
                "does not go on from there.",
                len(start.states),
                self.num_workers,
            )
            start = None
        return WorkerDraws(
            usual if start is None else start, isinstance(self.dataset, IterableDataset), self.persistent_workers, self._read_at_once
        )

    def _whole(self) -> Iterator[Any]:
        """The epoch from its start."""
        return self._heard(self.base_dataloader)

    def _heard(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of `loader`, whose worker processes, if it has some that tell what they draw, are listened to."""
        workers = self._position.workers
        if workers is None:
            return self._iterated(loader)
        speaking = Speaking(loader.collate_fn, loader.worker_init_fn, workers.start.states)
        own = loader.collate_fn, loader.worker_init_fn
        loader.collate_fn, loader.worker_init_fn = speaking.collate, speaking.begin
        try:
            batches: Iterator[Told] = self._iterated(loader)
        finally:
            loader.collate_fn, loader.worker_init_fn = own
        return self._noted(batches, workers)

    def _noted(self, batches: Iterator[Told], workers: WorkerDraws) -> Iterator[Any]:
        for number, (batch, worker, states) in enumerate(batches, workers.start.first):
            workers.note(number, worker, states, self._position.batches)
            yield batch

    def _iterated(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """torch's iterator over `loader`. For workers that persist a seed is drawn once, and none for others that stand in for them."""
        generator = loader.generator
        if self._workers_are_seeded:
            loader.generator = torch.Generator()
        try:
            return DataLoader.__iter__(loader) if loader is self else iter(loader)
        finally:
            loader.generator = generator

    def _like_this(self, indices: Iterable[Any]) -> DataLoader[Any]:
        """torch's loader of the same samples, with other indices."""
        arguments = loader_arguments(self)
        if self.batch_sampler is None:
            return DataLoader(self.dataset, batch_size=None, sampler=indices, **arguments)
        return DataLoader(self.dataset, batch_sampler=indices, **arguments)

    def _reads_here(self) -> bool:
        """Whether samples are read in this process, with its random generators."""
        return self.num_workers == 0
