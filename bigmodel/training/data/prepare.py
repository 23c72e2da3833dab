"""Loaders of one process, made of loaders that know nothing of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ...errors import TrainingError
from ..enums import RNGType
from ..state import PartialState
from .dispatched import DataLoaderDispatcher
from .loader import PreparedLoader, loader_arguments
from .mesh import data_shares
from .samplers import BatchSamplerShard, SeedableRandomSampler, sampler_below, set_sampler_below
from .sharded import DataLoaderShard
from .streams import IterableDatasetShard

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """A loader that gives this process its share of the batches of `dataloader`; a loader that is prepared already comes back as it is.

    Args:
        dataloader: what one process alone would iterate.
        device: where batches are put, with `put_on_device`; None: this process's device.
        num_processes, process_index: among how many processes, and which one; None: as `PartialState` says.
        split_batches: the batch size is that of all processes together, and a multiple of their number; else each process has it.
        put_on_device: put batches on `device`.
        rng_types: generators that are made equal on all processes when an epoch begins; `"generator"` is that of the sampler, of the
            batch sampler
            or of a stream. None: that one, where there are several processes and it decides the order.
        dispatch_batches: the main process reads for all, and sends; None: for streams that are put on a device.
        even_batches: as many batches for each process, by samples from the start of the data (`BatchSamplerShard`).
        slice_fn_for_dispatch: how the main process cuts batches, `slice_fn(batch, slice, process_index=, num_processes=)`.
        use_seedable_sampler: shuffle by `SeedableRandomSampler` where the sampler is a `RandomSampler`.
        data_seed: its seed; None: the seed of the sampler's generator, or torch's, of the main process.
        non_blocking: copies to the device do not wait; for loaders with `pin_memory`.
        use_stateful_dataloader: torchdata's loader reads, which asks datasets and samplers for their states.
        torch_device_mesh: processes along its tensor- and context-parallel dimensions get the same samples; the others tell shares.

    Raises:
        TrainingError: batches to be split that do not go into equal parts, `dispatch_batches` without `put_on_device`.
        MissingPackageError: `use_stateful_dataloader` without torchdata.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    dataset = dataloader.dataset
    reads_a_stream = isinstance(dataset, IterableDataset)
    dispatches = put_on_device and reads_a_stream if dispatch_batches is None else dispatch_batches
    if dispatches and not put_on_device:
        raise TrainingError("dispatch_batches=True puts batches on each process's device: pass put_on_device=True.")
    state = PartialState()
    shares = state.num_processes if num_processes is None else num_processes
    share = state.process_index if process_index is None else process_index
    if torch_device_mesh is not None:
        share_of = data_shares(torch_device_mesh)
        shares, share = max(share_of) + 1, share_of[state.process_index]
    if split_batches:
        _check_split(dataloader, shares)
    source = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    if use_seedable_sampler and not reads_a_stream:
        source = _seedable(source, data_seed)

    arguments = loader_arguments(dataloader)
    common = {"use_stateful_dataloader": use_stateful_dataloader, "_drop_last": _drops_last(dataloader), "_non_blocking": non_blocking}
    if dispatches:
        return DataLoaderDispatcher(
            dataset,
            split_batches,
            slice_fn=slice_fn_for_dispatch,
            torch_device_mesh=torch_device_mesh,
            **common,
            **_chosen_by(dataloader, source, dataloader.batch_size),
            **arguments,
        )
    generator = None
    if shares == 1 and torch_device_mesh is None:
        chosen = _chosen_by(dataloader, source, dataloader.batch_size)
    elif isinstance(dataset, IterableDataset):
        generator = getattr(dataset, "generator", None)
        dataset = IterableDatasetShard(dataset, dataloader.batch_size, dataloader.drop_last, shares, share, split_batches)
        size = dataloader.batch_size
        chosen = _chosen_by(dataloader, source, size // shares if size and split_batches else size)
    else:
        generator = _order_generator(source)
        shard = BatchSamplerShard(source, shares, share, split_batches, even_batches)
        chosen = _chosen_by(dataloader, shard, None)
    kinds: Iterable[str | RNGType] = [RNGType.GENERATOR] if rng_types is None else rng_types
    return DataLoaderShard(
        dataset,
        device=(state.device if device is None else device) if put_on_device else None,
        rng_types=[kind for kind in kinds if kind != RNGType.GENERATOR or generator is not None],
        synchronized_generator=generator,
        torch_device_mesh=torch_device_mesh,
        **common,
        **chosen,
        **arguments,
    )


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    return dataloader.drop_last or bool(getattr(dataloader.batch_sampler, "drop_last", False))


def _check_split(dataloader: DataLoader[Any], shares: int) -> None:
    source = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    size = dataloader.batch_size if dataloader.batch_size is not None else getattr(source, "batch_size", None)
    if not size or size % shares:
        raise TrainingError(
            f"split_batches=True cuts batches into {shares} equal parts, and this loader's batch size is {size}: choose a multiple of "
            f"{shares}, or give its batch sampler an attribute `batch_size`."
        )


def _chosen_by(dataloader: DataLoader[Any], source: Any, batch_size: int | None) -> dict[str, Any]:
    """The arguments that choose samples: the size of a stream's batches, or what gives the indices of every batch."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": batch_size, "drop_last": dataloader.drop_last}
    return {"sampler": source, "batch_size": None} if dataloader.batch_sampler is None else {"batch_sampler": source}


def _seedable(source: Any, data_seed: int | None) -> Any:
    """`source`, shuffled by a `SeedableRandomSampler` where a `RandomSampler` has done so."""
    shuffles = sampler_below(source)
    if not isinstance(shuffles, RandomSampler) or (isinstance(shuffles, SeedableRandomSampler) and data_seed is None):
        return source
    seedable = SeedableRandomSampler(
        shuffles.data_source, shuffles.replacement, shuffles._num_samples, shuffles.generator, data_seed=data_seed
    )
    if type(source) is BatchSampler:  # the user's own loader goes on as it was
        return BatchSampler(seedable, source.batch_size, source.drop_last)
    return set_sampler_below(source, seedable)


def _order_generator(source: Any) -> torch.Generator | None:
    """The generator that decides the order of the samples, made here where the sampler would draw from torch's; None: there is none."""
    for holder in (sampler_below(source), source):
        if isinstance(holder, SeedableRandomSampler) or not hasattr(holder, "generator"):
            continue
        if holder.generator is None:
            holder.generator = torch.Generator()
            holder.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        generator: torch.Generator = holder.generator
        return generator
    return None
