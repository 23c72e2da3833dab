"""The loader of a process that reads its own share: what it gives, what it knows of its end, and how it goes on."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from bigmodel.errors import TrainingError
from bigmodel.training.data import (
    BatchSamplerShard,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.state import PartialState


class Stream(IterableDataset[Any]):
    """The numbers from 0 (split between worker processes), or what else it is given."""

    def __init__(self, elements: int | list[Any]):
        self.elements = list(range(elements)) if isinstance(elements, int) else elements
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return len(self.elements)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        return iter(self.elements if worker is None else self.elements[worker.id :: worker.num_workers])


class Noisy(Dataset[Any]):
    """Sample `i` is `i`, and something drawn when it is read."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def lists(loader: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def ranks_of(loader: DataLoader[Any], ranks: int, **options: Any) -> list[Any]:
    return [prepare_data_loader(loader, num_processes=ranks, process_index=rank, **options) for rank in range(ranks)]


def looped(loader: Any) -> list[tuple[list[int], bool, int]]:
    """Every batch, with what the loader and the gradient state say of it."""
    seen = []
    for batch in loader:
        state = GradientState()
        assert state.active_dataloader is loader
        assert (state.end_of_dataloader, state.remainder) == (loader.end_of_dataloader, loader.remainder)
        seen.append((batch.tolist(), loader.end_of_dataloader, loader.remainder))
    assert not GradientState().in_dataloader
    return seen


def for_metrics(ranks: list[list[tuple[list[int], bool, int]]]) -> list[int]:
    """What a gather gives that drops repeats by `remainder`."""
    samples: list[int] = []
    for together in zip(*ranks, strict=True):
        gathered = [sample for batch, _, _ in together for sample in batch]
        assert len({(end, remainder) for _, end, remainder in together}) == 1
        remainder = together[0][2]
        samples += gathered[:remainder] if remainder > 0 else gathered
    return samples


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_metrics_are_exact(size: int, each: int, ranks: int, splits: bool, drop_last: bool, streams: bool) -> None:
    batch_size = each * ranks if splits else each
    loader = DataLoader(Stream(size) if streams else range(size), batch_size, drop_last=drop_last)
    prepared = ranks_of(loader, ranks, split_batches=splits, dispatch_batches=False)
    seen = [looped(loader) for loader in prepared]
    assert [len(loader) for loader in prepared] == [len(batches) for batches in seen]
    assert for_metrics(seen) == list(range(size - size % (each * ranks) * drop_last))
    assert [[end for _, end, _ in batches] for batches in seen] == [[False] * (len(seen[0]) - 1) + [True] * bool(seen[0])] * ranks
    assert {loader.total_batch_size for loader in prepared} == {each * ranks}
    assert {loader.total_dataset_length for loader in prepared} == {size}


@pytest.mark.parametrize(("size", "remainder"), [(10, 2), (9, 1), (8, 0), (3, 3)])
@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_one_process_tells_how_many_samples_a_short_last_batch_has(size: int, remainder: int, dispatches: bool, streams: bool) -> None:
    PartialState(cpu=True)
    loader = DataLoader(Stream(size) if streams else range(size), 4)
    (prepared,) = ranks_of(loader, 1, dispatch_batches=dispatches, put_on_device=True)
    assert [told for _, _, told in looped(prepared)] == [-1] * (-(-size // 4) - 1) + [remainder]


@pytest.mark.parametrize(("size", "start"), [(16, "fork"), (13, "forkserver"), (3, "fork")])
def test_streams_read_by_workers_say_which_batches_repeat_samples(size: int, start: str) -> None:
    loader = DataLoader(Stream(size), 2, num_workers=2, multiprocessing_context=start)
    seen = [looped(loader) for loader in ranks_of(loader, 2)]
    assert sorted(for_metrics(seen)) == list(range(size))
    assert len(seen[0]) == sum(-(-len(range(worker, size, 2)) // 4) for worker in range(2))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(2, 4), st.booleans(), st.booleans())
def test_streams_are_shared_out(size: int, each: int, ranks: int, splits: bool, drop_last: bool) -> None:
    batch_size = each * ranks if splits else each
    whole = each * ranks
    shards = [IterableDatasetShard(Stream(size), batch_size, drop_last, ranks, rank, splits) for rank in range(ranks)]
    seen = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(samples) for samples in seen]
    steps = size // whole if drop_last else -(-size // whole)
    expected = list(islice(cycle(range(size)), steps * whole)) if size else []
    for rank, samples in enumerate(seen):
        assert samples == [sample for step in range(steps) for sample in expected[step * whole :][each * rank : each * (rank + 1)]]


def test_elements_of_a_stream_that_are_batches() -> None:
    batches = [torch.arange(2), torch.arange(2, 7), torch.arange(7, 8)]
    prepared = ranks_of(DataLoader(Stream(batches), batch_size=None), 2)
    seen = [looped(loader) for loader in prepared]
    assert seen[0] == [([0, 1], False, -1), ([7], True, 1)]
    assert seen[1] == [([2, 3, 4, 5, 6], False, -1), ([0, 1], True, 1)]
    assert [loader.total_batch_size for loader in prepared] == [None, None]


def test_loaders_without_batches() -> None:
    data = [torch.tensor([index, index]) for index in range(3)]
    seen = [looped(loader) for loader in ranks_of(DataLoader(data, batch_size=None), 2)]
    assert [[batch for batch, _, _ in batches] for batches in seen] == [[[0, 0], [2, 2]], [[1, 1], [0, 0]]]
    assert [batches[-1][1:] for batches in seen] == [(True, -1)] * 2  # nobody knows how long the other's batch is


class Whole(Dataset[Any]):
    """Read by lists of indices."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: list[int]) -> torch.Tensor:
        return torch.tensor(index)


def test_a_batch_sampler_as_sampler() -> None:
    loader = DataLoader(Whole(), sampler=BatchSampler(SequentialSampler(range(7)), 2, False), batch_size=None)
    seen = [looped(loader) for loader in ranks_of(loader, 2)]
    assert seen[0] == [([0, 1], False, -1), ([4, 5], True, 3)]
    assert seen[1] == [([2, 3], False, -1), ([6, 0], True, 3)]
    assert ranks_of(loader, 2)[0].total_batch_size == 4


class Buckets:
    """A batch sampler with a size of its own for every batch, shuffled by `random`."""

    def __init__(self) -> None:
        self.batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8]]
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.batches)
        random.shuffle(order)
        return iter(order)


def test_custom_batch_samplers() -> None:
    buckets = Buckets()
    loader = DataLoader(range(9), batch_sampler=buckets)
    prepared = ranks_of(loader, 2)
    seen = []
    for shard in prepared:
        random.seed(3)
        seen.append(looped(shard))
    assert sorted(for_metrics(seen)) == list(range(9))
    assert buckets.epochs == [0, 0]
    assert prepared[0].batch_sampler.batch_sampler is buckets
    with pytest.raises(TrainingError, match="batch size is None"):
        prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)
    assert len(looped(prepare_data_loader(loader, num_processes=1, process_index=0))) == 5


def test_attributes_stay_reachable() -> None:
    data = list(range(10))
    loader = DataLoader(data, 4, shuffle=True, num_workers=0)
    for ranks in (1, 2):
        prepared = prepare_data_loader(loader, num_processes=ranks, process_index=0)
        assert isinstance(prepared, DataLoaderShard)
        assert isinstance(prepared, DataLoader)
        assert prepared.dataset is data
        assert prepared.sampler is loader.sampler
        assert prepared.get_sampler() is loader.sampler
        assert prepared.collate_fn is loader.collate_fn
        assert len(prepared) == -(-3 // ranks)
        assert (prepared.total_batch_size, prepared.total_dataset_length) == (4 * ranks, 10)
        assert isinstance(prepared.batch_sampler, BatchSamplerShard) == (ranks == 2)
        assert prepare_data_loader(prepared, num_processes=ranks, process_index=0) is prepared
        for twin in (pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)):
            twin.load_state_dict(prepared.state_dict())
            torch.manual_seed(0)
            seen = lists(twin)
            torch.manual_seed(0)
            assert lists(prepared) == seen


def test_one_process_sees_what_the_loader_gave() -> None:
    loader = DataLoader(range(20), 3, shuffle=True)
    torch.manual_seed(4)
    plain = [lists(loader), lists(loader)]
    prepared = prepare_data_loader(loader)
    torch.manual_seed(4)
    assert [lists(prepared), lists(prepared)] == plain


def test_epochs_are_told_to_samplers_and_data() -> None:
    stream = Stream(5)
    loader = prepare_data_loader(DataLoader(stream, 2))
    list(loader)
    list(loader)
    assert (loader.iteration, stream.epochs) == (2, [0, 1])
    loader.set_epoch(7)
    assert (loader.iteration, stream.epochs) == (7, [0, 1, 7])
    for _ in loader:
        break
    assert loader.iteration == 7  # an epoch broken off begins again
    shards = ranks_of(DataLoader(stream, 2), 2)
    shards[1].set_epoch(3)
    assert stream.epochs[-1] == 3


class Ordered(IterableDataset[int]):
    """A stream shuffled by a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.generator).tolist())


def test_a_streams_generator_is_seeded_with_the_epoch() -> None:
    one, other = (IterableDatasetShard(Ordered(), 2, False, 2, rank) for rank in range(2))
    assert sorted([*one, *other]) == list(range(8))
    first = list(one)
    one.set_epoch(1)
    other.set_epoch(1)
    assert sorted([*one, *other]) == list(range(8))
    assert list(one) != first


def test_the_seedable_sampler_takes_the_place_of_the_random_one() -> None:
    loader = DataLoader(range(20), 4, shuffle=True)
    prepared = prepare_data_loader(loader, use_seedable_sampler=True, data_seed=6)
    sampler = prepared.get_sampler()
    assert isinstance(sampler, SeedableRandomSampler)
    assert not isinstance(loader.sampler, SeedableRandomSampler)
    order = [torch.randperm(20, generator=torch.Generator().manual_seed(6 + epoch)).tolist() for epoch in range(3)]
    assert [flat(lists(prepared)) for _ in range(2)] == order[:2]
    prepared.set_epoch(0)
    assert flat(lists(prepared)) == order[0]
    halves = ranks_of(loader, 2, use_seedable_sampler=True, data_seed=6)
    assert lists(halves[0]) == [order[0][0:4], order[0][8:12], order[0][16:20]]
    with_generator = DataLoader(range(20), 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    assert prepare_data_loader(with_generator, use_seedable_sampler=True).get_sampler().initial_seed == 9


def test_set_sampler() -> None:
    prepared = ranks_of(DataLoader(range(8), 2), 2)[1]
    prepared.set_sampler([7, 6, 5, 4, 3, 2, 1, 0])
    assert lists(prepared) == [[5, 4], [1, 0]]
    assert prepared.get_sampler() == prepared.sampler == [7, 6, 5, 4, 3, 2, 1, 0]
    items = ranks_of(DataLoader(torch.arange(4), batch_size=None), 2)[1]
    items.set_sampler([3, 2, 1, 0])
    assert [item.item() for item in items] == [2, 0]


def test_nested_loops_and_loops_broken_off() -> None:
    outer, inner = (prepare_data_loader(DataLoader(range(6), 2)) for _ in range(2))
    for step, _ in enumerate(outer):
        assert GradientState().active_dataloader is outer
        assert GradientState().end_of_dataloader == (step == 2)
        for _ in inner:
            assert GradientState().active_dataloader is inner
            break
        assert GradientState().active_dataloader is outer
    assert not GradientState().in_dataloader


def test_batches_are_put_on_the_device(execution_device: torch.device) -> None:
    data = [{"number": torch.tensor(index), "text": str(index)} for index in range(4)]
    loader = DataLoader(data, 2)
    prepared = prepare_data_loader(loader, device=execution_device, put_on_device=True, non_blocking=True)
    batches = list(prepared)
    assert {batch["number"].device for batch in batches} == {execution_device}
    assert [batch["number"].tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [batch["text"] for batch in batches] == [["0", "1"], ["2", "3"]]


# Going on


def shuffled(kind: str, workers: int = 0) -> DataLoader[Any]:
    if kind == "weighted":
        return DataLoader(range(23), 3, sampler=WeightedRandomSampler([1.0] * 23, 23), num_workers=workers)
    if kind == "generator":
        return DataLoader(range(23), 3, shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=workers)
    if kind == "buckets":
        return DataLoader(range(9), batch_sampler=Buckets(), num_workers=workers)
    if kind == "stream":
        return DataLoader(Stream(23), 3, num_workers=workers)
    if kind == "items":
        return DataLoader(torch.arange(23).unsqueeze(1), batch_size=None, shuffle=True, num_workers=workers)
    return DataLoader(range(23), 3, shuffle=True, num_workers=workers)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["random", "seedable", "generator", "weighted", "buckets", "stream", "items"])
def test_the_rest_of_an_epoch_and_no_other_batch(kind: str, ranks: int, workers: int) -> None:
    prepare = partial(
        prepare_data_loader,
        num_processes=ranks,
        process_index=0,
        use_seedable_sampler=kind == "seedable",
        use_stateful_dataloader=False,
    )
    seeded(0)
    loader = prepare(shuffled(kind, workers))
    list(loader)  # an epoch before
    states, randoms, seen = [], [], []
    for batch in loader:
        torch.rand(1)  # the training draws, too
        seen.append(batch.tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
        randoms.append(torch.get_rng_state())
    following = lists(loader)
    for stop in {0, 1, len(seen) - 2, len(seen) - 1}:
        seeded(99)
        resumed = prepare(shuffled(kind, workers))
        resumed.load_state_dict(states[stop])
        assert resumed.state_dict() == states[stop]
        torch.set_rng_state(randoms[stop])
        rest = []
        if stop < len(seen) - 1:
            for batch in resumed:
                torch.rand(1)
                rest.append(batch.tolist())
            assert resumed.end_of_dataloader
        assert rest == seen[stop + 1 :]
        assert resumed.iteration == 2
        if kind != "buckets":  # drawn from `random`, which the state leaves alone
            assert lists(resumed) == following


def test_what_the_data_draws_goes_on_as_well() -> None:
    seeded(0)
    loader = prepare_data_loader(DataLoader(Noisy(), 4, shuffle=True))
    seen = []
    for step, (numbers, noise) in enumerate(loader):
        torch.rand(1)
        seen.append((numbers.tolist(), noise.tolist()))
        if step == 2:
            state, rng = loader.state_dict(), torch.get_rng_state()
    seeded(5)
    resumed = prepare_data_loader(DataLoader(Noisy(), 4, shuffle=True))
    resumed.load_state_dict(state)
    torch.set_rng_state(rng)
    rest = []
    for numbers, noise in resumed:
        torch.rand(1)
        rest.append((numbers.tolist(), noise.tolist()))
    assert rest == seen[3:]


def test_a_loop_broken_off_tells_where() -> None:
    loader = prepare_data_loader(DataLoader(range(10), 2, shuffle=True))
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            break
    other = prepare_data_loader(DataLoader(range(10), 2, shuffle=True))
    other.load_state_dict(loader.state_dict())
    assert sorted(flat([*seen, *lists(other)])) == list(range(10))


def test_a_state_of_other_batches_is_refused_in_the_midst_of_an_epoch() -> None:
    loader = ranks_of(DataLoader(range(24), 3), 2)[0]
    for _ in loader:
        state = loader.state_dict()
        break
    with pytest.raises(TrainingError, match="after 1 batches of 6 samples of all processes together; this loader has 12 at a step"):
        ranks_of(DataLoader(range(24), 3), 4)[0].load_state_dict(state)
    other = ranks_of(DataLoader(range(24), 2), 3)[0]  # more processes, as many samples at a step
    other.load_state_dict(state)
    assert lists(other) == [[6, 7], [12, 13], [18, 19]]
    list(loader)
    ranks_of(DataLoader(range(24), 3), 4)[0].load_state_dict(loader.state_dict())


def test_workers_that_persist() -> None:
    def made() -> Any:
        return prepare_data_loader(DataLoader(range(20), 3, shuffle=True, num_workers=1, persistent_workers=True))

    torch.manual_seed(0)
    loader = made()
    states, randoms, seen = [], [], []
    for _ in range(3):
        seen.append([])
        for batch in loader:
            seen[-1].append(batch.tolist())
            states.append(loader.state_dict())
            randoms.append(torch.get_rng_state())
    assert [sorted(flat(epoch)) for epoch in seen] == [list(range(20))] * 3
    for stop in (2, 6, 9):  # in the first epoch, at its end, in the second
        resumed = made()
        resumed.load_state_dict(states[stop])
        torch.set_rng_state(randoms[stop])
        epoch, batches = divmod(stop + 1, 7)
        assert [lists(resumed) for _ in range(3 - epoch)] == [seen[epoch][batches:], *seen[epoch + 1 :]]


def test_another_epoch_is_begun_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loader = prepare_data_loader(DataLoader(range(10), 2))
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert lists(loader) == [[2, 3], [4, 5], [6, 7], [8, 9]]
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert "state is of epoch 0, after 1 batches; set_epoch(3)" in caplog.text
    assert len(lists(loader)) == 5
    with pytest.raises(TrainingError, match="layout None"):
        loader.load_state_dict({"_num_yielded": 3})


@pytest.mark.parametrize("kind", ["random", "stream", "items", "buckets"])
def test_skipped_batches(kind: str) -> None:
    for loader in (shuffled(kind), *ranks_of(shuffled(kind), 2)):
        state = loader.state_dict() if isinstance(loader, DataLoaderShard) else None
        seeded(1)
        whole = lists(loader)
        for count in (0, 2, len(whole), len(whole) + 3):
            skipped = skip_first_batches(loader, count)
            if state is not None:
                loader.load_state_dict(state)
            seeded(1)
            assert lists(skipped) == whole[count:]
            assert len(skipped) == len(whole[count:])


def test_a_shortened_epoch_is_followed_by_the_next() -> None:
    loader = ranks_of(DataLoader(range(24), 3, shuffle=True), 2, use_seedable_sampler=True, data_seed=2)[0]
    first, second = lists(loader), lists(loader)
    again = ranks_of(DataLoader(range(24), 3, shuffle=True), 2, use_seedable_sampler=True, data_seed=2)[0]
    shortened = skip_first_batches(again, 2)
    rest = []
    for batch in shortened:
        rest.append(batch.tolist())
        state = again.state_dict()
    assert rest == first[2:]
    assert shortened.end_of_dataloader
    assert (state["epoch"], state["batches"]) == (1, 0)
    assert lists(again) == second


def test_skip_data_loader() -> None:
    loader = SkipDataLoader(Stream(7), 2, batch_size=2)
    assert looped(loader) == [([4, 5], False, -1), ([6], True, 1)]
    assert len(loader) == 2
    assert lists(SkipDataLoader(range(7), 1, batch_size=3)) == [[3, 4, 5], [6]]


def test_dispatching_needs_a_device() -> None:
    with pytest.raises(TrainingError, match="put_on_device=True"):
        prepare_data_loader(DataLoader(range(4)), dispatch_batches=True)


class Mesh:
    """As much of a device mesh as tells shares."""

    def __init__(self, **sizes: int):
        self.mesh_dim_names = tuple(sizes)
        self.mesh = torch.arange(int(np.prod(list(sizes.values())))).reshape(*sizes.values())


def test_processes_along_a_tensor_parallel_dimension_see_the_same() -> None:
    from bigmodel.training.data.mesh import data_shares

    assert data_shares(Mesh(dp=2, tp=3)) == [0, 0, 0, 1, 1, 1]
    assert data_shares(Mesh(tp=2, dp=2)) == [0, 1, 0, 1]
    assert data_shares(Mesh(dp_replicate=2, dp_shard=2, cp=1, tp=2)) == [0, 0, 1, 1, 2, 2, 3, 3]
    prepared = prepare_data_loader(DataLoader(range(8), 2), torch_device_mesh=Mesh(dp=2, tp=2))
    assert lists(prepared) == [[0, 1], [4, 5]]


def test_a_random_sampler_gets_a_generator_of_its_own() -> None:
    loader = DataLoader(range(30), 3, shuffle=True)
    shards = ranks_of(loader, 2)
    assert isinstance(loader.sampler, RandomSampler)
    assert all(shard.synchronized_generator is loader.sampler.generator is not None for shard in shards)
    assert shards[0].rng_types == ["generator"]
    assert ranks_of(DataLoader(range(30), 3), 2)[0].rng_types == []
