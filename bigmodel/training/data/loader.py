"""What the loaders of this room have in common: they are torch's `DataLoader`, know their last batch, and go on where they were stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..gradient_state import GradientState
from .position import Draws, Position, Resumption
from .samplers import SkipBatchSampler
from .stateful import stateful_loader

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


def loader_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments that `loader` was made with, but those of the dataset and of what chooses samples."""
    return {name: getattr(loader, name) for name in KEPT if hasattr(loader, name)}


def get_sampler(loader: DataLoader[Any]) -> Any:
    """What chooses single samples, below any batch sampler; None where a stream is read, or a batch sampler has none."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader.sampler, BatchSampler) or loader.batch_sampler is not None:
        return getattr(loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler, "sampler", None)
    return loader.sampler


class PreparedLoader(DataLoader[Any]):
    """A `DataLoader` of one process among several.

    Attributes:
        end_of_dataloader: whether the batch handed out last is the last one.
        remainder: where the batch handed out last repeats samples in some process, how many of those of all processes together are none:
            they stand first, in the order of the processes. 0: the last batch, and nothing in it is repeated. -1: not the last batch, or
            nobody can tell.
        iteration: the epoch, from 0; goes up at the end of each.
        skip_batches: left out at the start of each epoch.
        device: where batches are put; None: they stay.
        use_stateful_dataloader: whether torchdata's loader reads.
    """

    end_of_dataloader = False
    remainder = -1

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
        self.base_dataloader: DataLoader[Any] = stateful_loader(dataset, **arguments) if use_stateful_dataloader else self
        sampler = getattr(self.batch_sampler, "sampler", None)
        if sampler is not None:
            self.__dict__["sampler"] = sampler  # torch leaves a sequential one here that nothing asks

    @property
    def gradient_state(self) -> GradientState:
        """Where the loops over loaders are known."""
        return GradientState()

    @property
    def iteration(self) -> int:
        """The epoch, from 0."""
        return self._position.epoch

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._position.epoch = iteration

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, for all processes together."""
        if hasattr(self.dataset, "total_length"):
            return int(self.dataset.total_length)
        return len(self.dataset)  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """What chooses single samples."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """`sampler` chooses single samples from the next epoch on."""
        if isinstance(self.sampler, BatchSampler):
            self.sampler.sampler = sampler
        else:
            self.batch_sampler.sampler = sampler  # type: ignore[union-attr]
            self.__dict__["sampler"] = sampler

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
        told: list[Any] = []
        asked = [self.dataset, self.batch_sampler, self.sampler]
        while asked:
            one = asked.pop()
            if one is None or any(one is other for other in told):
                continue
            told.append(one)
            if one is not self.dataset:
                asked += [getattr(one, "batch_sampler", None), getattr(one, "sampler", None)]
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: taken while it is iterated, after the batch handed out last. Numbers, lists and dictionaries only.

        After the last batch of an epoch it is the start of the next one. With torchdata's loader it also has what dataset and samplers gave.
        """
        return self._position.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iteration hands out the rest of the epoch that `state_dict` was taken in, and no other batch.

        Random order is drawn again as at the start of that epoch; the default random generators are left as they are found.

        Raises:
            TrainingError: a state that is none, or of a later bigmodel.
        """
        self._position.load(state_dict)

    def own_generators(self) -> list[torch.Generator]:
        """The generators that order depends on, each once."""
        holders = [self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "batch_sampler", None), self.dataset]
        found: list[torch.Generator] = []
        for holder in [*holders, getattr(self.dataset, "dataset", None)]:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                found.append(generator)
        return found

    def _open(self) -> Iterator[Any]:
        """The batches of this process from where the epoch begins or goes on; `_position` is there."""
        position = self._position
        going_on, position.resumption = position.resumption, None
        self.end_of_dataloader = False
        self.remainder = -1
        self.set_epoch(going_on.epoch if going_on else position.epoch)
        if going_on is None:
            position.begin(position.epoch, Draws.now(self.own_generators()))
            position.batches = self.skip_batches
            return self._batches_from(self.skip_batches, None)
        position.begin(going_on.epoch, going_on.start)
        position.batches = going_on.batches
        return self._gone_on(going_on)

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
            self.base_dataloader.load_state_dict(going_on.base)  # type: ignore[attr-defined]
            return iter(self.base_dataloader)
        if not start:
            return self._whole()
        if isinstance(self.dataset, IterableDataset):
            batches = self._whole()
            for _ in range(start):
                next(batches, END)
            cursor = None
        else:
            cursor = _Cursor(SkipBatchSampler(self.sampler if self.batch_sampler is None else self.batch_sampler, start))
            batches = iter(self._like_this(cursor))
        if going_on is not None and going_on.ahead is not None:
            # What a dataset draws for a sample is drawn as it was, now that the order is known again.
            if cursor is not None:
                cursor.look()
            torch.set_rng_state(going_on.ahead)
        return batches

    def _whole(self) -> Iterator[Any]:
        """The epoch from its start."""
        return super().__iter__() if self.base_dataloader is self else iter(self.base_dataloader)

    def _like_this(self, indices: Iterable[Any]) -> DataLoader[Any]:
        """torch's loader of the same samples, with other indices."""
        arguments = loader_arguments(self)
        if self.batch_sampler is None:
            return DataLoader(self.dataset, batch_size=None, sampler=indices, **arguments)
        return DataLoader(self.dataset, batch_sampler=indices, **arguments)

    def _reads_here(self) -> bool:
        """Whether samples are read in this process, with its random generators."""
        return self.num_workers == 0


class _Cursor:
    """Indices whose first can be looked at before it is asked for."""

    def __init__(self, indices: Iterable[Any]):
        self.indices = indices
        self.iterator: Iterator[Any] = iter(())

    def __iter__(self) -> _Cursor:
        self.iterator = iter(self.indices)
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def look(self) -> None:
        """Whatever the first index depends on is drawn."""
        first = next(self.iterator, END)
        if first is not END:
            self.iterator = chain((first,), self.iterator)
