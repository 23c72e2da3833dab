"""The loader of a process that reads its own share of the batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, default_collate
from torch.utils.data._utils.collate import default_convert

from ...dispatch import send_to_device
from ..enums import RNGType
from ..gradient_state import GradientState
from ..random import synchronize_rng_states
from ..state import PartialState
from .loader import END, PreparedLoader
from .samplers import BatchSamplerShard, SeedableRandomSampler
from .streams import CountingCollate, IterableDatasetShard

__all__ = ["DataLoaderShard"]


class DataLoaderShard(PreparedLoader):
    """A `DataLoader` that reads one batch ahead, so that the last one is known, and puts batches on a device.

    Args:
        dataset: as for `torch.utils.data.DataLoader`; what it gives may be all processes' or this one's (`IterableDatasetShard`).
        device: where batches are put; None: they stay.
        rng_types: generators that are made equal on all processes when an epoch begins; `"generator"` is `synchronized_generator`.
        synchronized_generator: of the sampler, batch sampler or dataset.
        skip_batches: left out at the start of each epoch.
        use_stateful_dataloader: torchdata's loader reads.
        _drop_last: whether short batches at the end are dropped for all processes.
        _non_blocking: copies to the device do not wait.
        torch_device_mesh: kept for scripts that pass it; shares are `prepare_data_loader`'s to compute.
        iteration: the epoch to begin with.
        kwargs: the other arguments of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Iterable[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ):
        # In this process the shard itself can be asked, which costs nothing.
        self._counts = isinstance(dataset, IterableDatasetShard) and kwargs.get("num_workers", 0) > 0
        if self._counts:
            collate = kwargs.get("collate_fn") or (default_convert if kwargs.get("batch_size", 1) is None else default_collate)
            kwargs["collate_fn"] = CountingCollate(collate, dataset)
        super().__init__(
            dataset,
            device=device,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            drop_last_of_all=_drop_last,
            non_blocking=_non_blocking,
            iteration=iteration,
            **kwargs,
        )
        self.rng_types = None if rng_types is None else list(rng_types)
        self.synchronized_generator = synchronized_generator

    @property
    def _source(self) -> Any:
        """What knows how large batches are."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset
        return self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all processes together at one step; None where batches have no size that is known."""
        own = self.own_batch_size
        return None if own is None else own * int(getattr(self._source, "num_processes", 1))

    @property
    def own_batch_size(self) -> int | None:
        """Samples of this process at one step; None where batches have no size that is known."""
        source = self._source
        size = getattr(source, "batch_size", self.batch_size)
        return None if size is None else int(size) // (source.num_processes if getattr(source, "split_batches", False) else 1)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._position.resumption is None:
            self._agree_on_order()
        position, stateful, device, non_blocking = self._position, self._stateful, self.device, self._non_blocking
        counts, reads_here = self._counts, self._reads_here()
        shard = self._shard()
        repeats = {} if shard is None else shard.real_samples
        random_state = torch.default_generator.get_state
        batches = self._open()
        GradientState()._add_dataloader(self)
        try:
            step = position.batches
            coming: Any = next(batches, END)
            position.finished = coming is END
            while coming is not END:
                if counts:
                    batch, real = coming
                else:
                    batch, real = coming, repeats.get(step, 0) if repeats else 0
                if device is not None:
                    batch = send_to_device(batch, device, non_blocking)
                if stateful is not None:
                    position.base = stateful.state_dict()
                if reads_here:
                    position.ahead = random_state()
                coming = next(batches, END)
                step += 1
                position.batches = step
                if coming is END:
                    position.finished = True
                    self._tell_end(
                        batch, self.dataset.real_samples if isinstance(self.dataset, IterableDatasetShard) and not counts else real
                    )
                elif real or self.remainder != -1:
                    self.remainder = real or -1
                yield batch
        finally:
            position.end()
            GradientState()._remove_dataloader(self)

    def _agree_on_order(self) -> None:
        """The random generators that samples are chosen by go on alike on all processes."""
        synchronize_rng_states(self.rng_types or [], self.synchronized_generator)
        sampler = self.get_sampler()
        if self._shard() is not None and isinstance(sampler, SeedableRandomSampler) and PartialState().use_distributed:
            seed = [sampler.initial_seed]
            dist.broadcast_object_list(seed, 0)
            sampler.initial_seed = seed[0]

    def _shard(self) -> BatchSamplerShard | None:
        """What gives this process its batches of those of all."""
        for source in (self.batch_sampler, self.sampler):
            if isinstance(source, BatchSamplerShard):
                return source
        return None
