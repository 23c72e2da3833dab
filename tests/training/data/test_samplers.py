"""What each process sees of a batch sampler, against statements of what it must see."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from bigmodel.errors import TrainingError
from bigmodel.training.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler


class Batches:
    """A batch sampler that gives these batches."""

    def __init__(self, batches: list[Any], batch_size: int | None = None, drop_last: bool = False):
        self.batches = batches
        if batch_size is not None:
            self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def shares(sampler: Any, ranks: int, **options: Any) -> tuple[list[list[Any]], list[dict[int, int]]]:
    """Batches and `real_samples` of every process; the lengths are checked on the way."""
    shards = [BatchSamplerShard(sampler, ranks, rank, **options) for rank in range(ranks)]
    seen = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(batches) for batches in seen]
    assert [list(shard) for shard in shards] == seen  # every iteration begins anew
    return seen, [dict(shard.real_samples) for shard in shards]


def in_order(seen: list[list[list[int]]], step: int) -> list[int]:
    """The samples of all processes at one step, as `gather` would give them."""
    return [sample for batches in seen if step < len(batches) for sample in batches[step]]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 70), st.integers(1, 6), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans())
def test_every_size_batch_and_number_of_processes(size: int, each: int, ranks: int, splits: bool, drop_last: bool, evens: bool) -> None:
    batch_size = each * ranks if splits else each
    sampler = BatchSampler(SequentialSampler(range(size)), batch_size, drop_last)
    seen, reals = shares(sampler, ranks, split_batches=splits, even_batches=evens)
    whole = each * ranks
    steps = max(map(len, seen))
    gathered = [in_order(seen, step) for step in range(steps)]
    full, left = divmod(size, whole)
    assert gathered[:full] == [list(range(step * whole, (step + 1) * whole)) for step in range(full)]
    assert all(len(batch) == each for batches in seen for batch in batches[:full])
    if drop_last:
        assert steps == full
        assert reals == [{}] * ranks
    elif evens and ranks > 1:
        assert steps == full + (left > 0)
        if left:
            assert gathered[full] == list(islice(cycle(range(size)), full * whole, (full + 1) * whole))
            assert all(len(batches[full]) == each for batches in seen)
        assert reals == [{full: left} if left else {}] * ranks
    else:
        assert [sample for step in gathered for sample in step] == list(range(size))
        assert reals == [{}] * ranks


SIZES = st.lists(st.integers(1, 7), max_size=14)


def of_sizes(sizes: list[int]) -> list[list[int]]:
    numbers = iter(range(sum(sizes)))
    return [list(islice(numbers, size)) for size in sizes]


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(2, 4), st.booleans(), st.booleans(), st.sampled_from([None, 4]))
def test_batches_of_varying_sizes_take_turns(sizes: list[int], ranks: int, evens: bool, drop_last: bool, stated: int | None) -> None:
    batches = of_sizes(sizes)
    seen, reals = shares(Batches(batches, stated, drop_last), ranks, even_batches=evens)
    rounds, left = divmod(len(batches), ranks)
    if drop_last or not evens:
        expected = batches[: rounds * ranks] if drop_last else batches
        assert seen == [expected[rank::ranks] for rank in range(ranks)]
        assert reals == [{}] * ranks
        return
    steps = rounds + (left > 0)
    assert [len(own) for own in seen] == [steps] * ranks
    handed_out = [own[step] for step in range(steps) for own in seen]
    filled = list(batches)
    last_turn = batches[ranks * (steps - 1) :]
    if stated is not None and batches and all(len(batch) == stated for batch in last_turn[:-1]):
        start = cycle(sample for batch in batches[: ranks if rounds else left] for sample in batch)
        filled[-1] = [*batches[-1], *islice(start, max(stated - len(batches[-1]), 0))]
        filled += [list(islice(start, stated)) for _ in range(steps * ranks - len(batches))]
    else:
        filled += islice(cycle(batches), steps * ranks - len(batches))
    assert handed_out == filled
    last = (steps - 1) * ranks
    real = sum(map(len, batches[last:])) if steps else 0
    assert reals == [{steps - 1: real} if filled != batches else {}] * ranks


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(2, 4), st.booleans())
def test_batches_of_varying_sizes_are_cut(sizes: list[int], ranks: int, evens: bool) -> None:
    batches = of_sizes(sizes)
    shards = [BatchSamplerShard(Batches(batches, 2 * ranks), ranks, rank, True, evens) for rank in range(ranks)]
    seen = [list(shard) for shard in shards]
    if not evens:
        assert sorted(sample for own in seen for batch in own for sample in batch) == list(range(sum(sizes)))
        return
    assert {len(own) for own in seen} == {len(batches)}
    for step, batch in enumerate(batches):
        assert len({len(own[step]) for own in seen}) == 1
        assert in_order(seen, step)[: len(batch)] == batch
        repeats = in_order(seen, step)[len(batch) :]
        assert repeats == list(islice(cycle(batches[0]), len(repeats)))
        assert [shard.real_samples.get(step) for shard in shards] == [len(batch) if repeats else None] * ranks


def test_items_that_are_no_lists_take_turns_whole() -> None:
    sampler = SequentialSampler(range(5))
    seen, reals = shares(sampler, 2)
    assert seen == [[0, 2, 4], [1, 3, 0]]
    assert reals == [{2: -1}] * 2
    assert shares(sampler, 2, even_batches=False) == ([[0, 2, 4], [1, 3]], [{}, {}])


def test_what_cannot_be_shared_is_refused() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 3, False)
    with pytest.raises(TrainingError, match="Batches of 3 samples cannot be cut into 2 equal parts"):
        BatchSamplerShard(sampler, 2, 0, split_batches=True)
    with pytest.raises(TrainingError, match="Batches of None samples"):
        BatchSamplerShard(Batches([[1]]), 2, 0, split_batches=True)
    with pytest.raises(TrainingError, match="no process 2 among 2"):
        BatchSamplerShard(sampler, 2, 2)


def test_attributes_and_the_sampler_underneath() -> None:
    inner = BatchSampler(SequentialSampler(range(10)), 3, True)
    shard = BatchSamplerShard(inner, 2, 1)
    assert (shard.batch_size, shard.drop_last, shard.total_length, shard.sampler) == (3, True, 3, inner.sampler)
    shard.sampler = SequentialSampler(range(7))
    assert inner.sampler is shard.sampler
    assert list(pickle.loads(pickle.dumps(shard))) == [[3, 4, 5]]


@given(st.integers(0, 20), st.integers(0, 8))
def test_skipped_batches(size: int, skipped: int) -> None:
    inner = BatchSampler(SequentialSampler(range(size)), 3, False)
    sampler = SkipBatchSampler(inner, skipped)
    assert list(sampler) == list(inner)[skipped:]
    assert list(sampler) == list(inner)[skipped:]
    assert len(sampler) == len(list(inner)[skipped:])
    assert (sampler.total_length, sampler.batch_size, sampler.drop_last) == (len(inner), 3, False)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def permutation(size: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_order_is_told_by_seed_and_epoch() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=5)
    torch.rand(3)
    assert list(sampler) == permutation(20, 5)
    assert list(sampler) == permutation(20, 6)  # the epoch went up by itself
    sampler.set_epoch(10)
    assert list(sampler) == permutation(20, 15)
    assert isinstance(sampler, RandomSampler)


def test_the_seed_is_the_generators_or_torchs() -> None:
    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    assert list(SeedableRandomSampler(range(20), generator=generator)) == permutation(20, 7)
    assert torch.equal(generator.get_state(), before)
    torch.manual_seed(11)
    assert SeedableRandomSampler(range(3)).initial_seed == 11


def test_an_iteration_broken_off_repeats_its_epoch() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=5)
    assert list(islice(sampler, 4)) == permutation(20, 5)[:4]
    assert list(sampler) == permutation(20, 5)
