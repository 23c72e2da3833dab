"""What is drawn at random in worker processes goes on where it was stopped, to the bit, whatever it was drawn for."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from processes import Processes
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bigmodel.training.data import prepare_data_loader, skip_first_batches

Batch = tuple[list[int], list[float]]


def noise() -> float:
    """Something of every default generator."""
    return torch.rand(()).item() + random.random() + float(numpy.random.rand())


def rare(index: int) -> float:
    """Something of one default generator, which alone tells that it was drawn; normal numbers are made two at a time."""
    draws = (torch.rand(()).item, random.random, numpy.random.rand, numpy.random.randn, numpy.random.randn)
    return float(draws[index % 5]()) if index % 3 else 0.0


class Rare(Dataset[Any]):
    """Samples of which one in a batch draws."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, rare(index)


class Noisy(Dataset[Any]):
    """Sample `i` is `i`, and something drawn when it is read; odd samples draw twice, so that what a worker draws depends on its items."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, noise() + (noise() if index % 2 else 0.0)


class NoisyStream(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for index in range(23)[worker.id :: worker.num_workers]:
            yield index, noise()


class Quiet(Dataset[Any]):
    """Samples that say by whom they were read, and draw nothing."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


def collated(samples: list[Any]) -> Any:
    """A collate function that draws, as those that mask words do."""
    return torch.tensor([index for index, _ in samples]), torch.tensor([value + noise() for _, value in samples], dtype=torch.float64)


def seed_worker(worker: int) -> None:
    """As scripts do it that want numpy to differ between workers."""
    numpy.random.seed(100 + worker)


def made(kind: str, **options: Any) -> Any:
    if kind == "stream":
        return prepare_data_loader(DataLoader(NoisyStream(), 3, num_workers=2, collate_fn=collated, **options))
    if kind == "rare":
        return prepare_data_loader(DataLoader(Rare(), batch_size=None, num_workers=2, **options))
    if kind == "items":
        return prepare_data_loader(DataLoader(Noisy(), batch_size=None, shuffle=True, num_workers=2, **options))
    return prepare_data_loader(DataLoader(Noisy(), 3, shuffle=True, collate_fn=collated, **options))


def plain(batch: Any) -> Any:
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def goes_on(make: Callable[[], Any], epochs: int, stops: list[int], length: int) -> None:
    """A loop of `epochs`, stopped after each of the numbers of batches, gives what it gives without a stop."""
    seeded(0)
    loader = make()
    states, randoms, seen = [], [], []
    for _ in range(epochs):
        seen.append([])
        for batch in loader:
            torch.rand(1)  # the training draws, too
            seen[-1].append(plain(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
            randoms.append(torch.get_rng_state())
        assert len(seen[-1]) == length
    for stop in stops:
        seeded(99)
        resumed = make()
        resumed.load_state_dict(states[stop])
        assert resumed.state_dict() == states[stop]
        torch.set_rng_state(randoms[stop])
        epoch, batches = divmod(stop + 1, length)
        rest = []
        for _ in range(epochs - epoch):
            rest.append([])
            for batch in resumed:
                torch.rand(1)
                rest[-1].append(plain(batch))
        assert rest == [seen[epoch][batches:], *seen[epoch + 1 :]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("map", {"num_workers": 1}),
        ("map", {"num_workers": 2}),
        ("map", {"num_workers": 3, "worker_init_fn": seed_worker}),
        ("map", {"num_workers": 2, "persistent_workers": True, "worker_init_fn": seed_worker}),
        ("items", {}),
        ("rare", {}),
        ("stream", {}),
        ("stream", {"persistent_workers": True}),
    ],
)
def test_the_rest_of_an_epoch_has_the_same_values(kind: str, options: dict[str, Any]) -> None:
    length = 23 if kind in ("items", "rare") else 8
    stops = [*range(22)] if kind == "rare" else [0, 4, length - 2, length - 1, length, length + 4]
    goes_on(partial(made, kind, **options), 2, stops, length)


def test_a_loader_that_was_stopped_twice() -> None:
    seeded(0)
    whole = [plain(batch) for batch in made("map", num_workers=3)]
    seeded(0)
    loader, seen = made("map", num_workers=3), []
    for stop in (2, 3, 8):
        iterator = iter(loader)
        seen += [plain(next(iterator)) for _ in range(stop - len(seen))]
        state = loader.state_dict()
        del iterator
        loader = made("map", num_workers=3)
        loader.load_state_dict(state)
    assert seen == whole


def test_an_epoch_that_was_shortened_by_hand_goes_on() -> None:
    def make() -> Any:
        return skip_first_batches(made("map", num_workers=2), 3)

    seeded(0)
    loader, seen = make(), []
    for batch in loader:
        seen.append(plain(batch))
        if len(seen) == 2:
            state = loader.state_dict()
    resumed = made("map", num_workers=2)
    resumed.load_state_dict(state)
    assert [plain(batch) for batch in resumed] == seen[2:]


def test_plain_torch_draws_the_same() -> None:
    seeded(0)
    expected = [plain(batch) for batch in DataLoader(Noisy(), 3, shuffle=True, collate_fn=collated, num_workers=2)]
    seeded(0)
    assert [plain(batch) for batch in made("map", num_workers=2)] == expected


def test_nothing_is_kept_where_nothing_is_drawn() -> None:
    loader = prepare_data_loader(DataLoader(Quiet(), 3, num_workers=2))
    for batch in loader:
        state = loader.state_dict()
        if batch[0] == 6:
            break
    assert state["workers"] == {"first": 2, "states": [None, None]}
    collate, init = loader.collate_fn, loader.worker_init_fn
    assert (collate, init) == (DataLoader(Quiet(), 3).collate_fn, None)


def test_another_number_of_workers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    seeded(0)
    loader = made("map", num_workers=2)
    iterator = iter(loader)
    seen = [plain(next(iterator)) for _ in range(3)]
    state = loader.state_dict()
    rest = [plain(batch)[0] for batch in iterator]
    resumed = made("map", num_workers=3)
    resumed.load_state_dict(state)
    assert [plain(batch)[0] for batch in resumed] == rest
    assert len(seen) + len(rest) == 8
    assert "2 worker processes, and this one has 3" in caplog.text


def dispatched() -> list[bool]:
    # The ranks of these tests are daemons, which may have no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    def make() -> Any:
        loader = DataLoader(Noisy(), 3, shuffle=True, collate_fn=collated, num_workers=2)
        return prepare_data_loader(loader, put_on_device=True, dispatch_batches=True)

    seeded(0)
    loader, seen, states, randoms = make(), [], [], []
    for batch in loader:
        seen.append(plain(batch))
        states.append(loader.state_dict())
        randoms.append(torch.get_rng_state())
    equal = []
    for stop, (state, rng) in enumerate(zip(states[:-1], randoms, strict=False)):
        resumed = make()
        resumed.load_state_dict(state)
        torch.set_rng_state(rng)
        equal.append([plain(batch) for batch in resumed] == seen[stop + 1 :])
    return equal


@pytest.mark.xdist_group("processes")
def test_batches_that_the_main_process_reads_for_all(processes: Callable[[int], Processes]) -> None:
    for equal in processes(2).run(dispatched):
        assert equal == [True] * 3
