"""Loaders without their first batches, to go on in the midst of an epoch."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .loader import PreparedLoader, loader_arguments
from .samplers import SkipBatchSampler
from .sharded import DataLoaderShard

__all__ = ["SkipDataLoader", "skip_first_batches"]


class SkipDataLoader(DataLoaderShard):
    """A `DataLoader` that leaves out the first `skip_batches` batches, each time it is iterated."""

    def __init__(self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any):
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader of the same batches without the first `num_batches` of this process; skipped samples are not read, unless from a stream.

    Of a prepared loader it shares epoch and state: when it has come to the end of an epoch, `dataloader` goes on with the next one, and
    `dataloader.state_dict()` tells where it stands.
    """
    if isinstance(dataloader, PreparedLoader):
        shortened = copy.copy(dataloader)
        shortened.skip_batches += num_batches
        return shortened
    arguments = loader_arguments(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(
            dataloader.dataset, num_batches, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, **arguments
        )
    if dataloader.batch_sampler is None:
        return DataLoader(dataloader.dataset, batch_size=None, sampler=SkipBatchSampler(dataloader.sampler, num_batches), **arguments)
    return DataLoader(dataloader.dataset, batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches), **arguments)
