"""Loaders and samplers that give every process its share of the data, know their last batch, and go on where they were stopped."""

from __future__ import annotations

from .dispatched import DataLoaderDispatcher
from .loader import PreparedLoader, get_sampler
from .prepare import prepare_data_loader
from .samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from .sharded import DataLoaderShard
from .skipping import SkipDataLoader, skip_first_batches
from .streams import IterableDatasetShard

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "PreparedLoader",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
