"""Loaders that torchdata reads for: the rest of an epoch, with what datasets say of themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from processes import Processes
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import MissingPackageError, TrainingError
from bigmodel.training.data import prepare_data_loader

stateful = pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed (pip install 'bigmodel[stateful]')")


class Remembering(IterableDataset[int]):
    """A stream that knows where it stands, and counts what is read of it."""

    def __init__(self, size: int):
        self.size = size
        self.next = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.size:
            self.next += 1
            self.read += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def made(kind: str, ranks: int, workers: int = 0) -> Any:
    data: Any = Remembering(23) if kind == "stream" else range(23)
    loader = DataLoader(data, 3, shuffle=kind == "random" or None, num_workers=workers)
    return prepare_data_loader(loader, num_processes=ranks, process_index=0, use_stateful_dataloader=True)


@stateful
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("kind", ["map", "random", "stream"])
def test_the_rest_of_an_epoch(kind: str, ranks: int, workers: int) -> None:
    if kind == "stream" and workers:
        pytest.skip("this stream is not shared out between workers")
    torch.manual_seed(0)
    loader = made(kind, ranks, workers)
    assert loader.use_stateful_dataloader
    assert type(loader.base_dataloader).__name__ == "StatefulDataLoader"
    states, randoms, seen = [], [], []
    for batch in loader:
        seen.append(batch.tolist())
        states.append(loader.state_dict())
        randoms.append(torch.get_rng_state())
    assert (loader.end_of_dataloader, loader.remainder) == (True, 2 if ranks == 1 else 5)
    following = [batch.tolist() for batch in loader]
    for stop in {0, 2, len(seen) - 1}:
        torch.manual_seed(7)
        resumed = made(kind, ranks, workers)
        resumed.load_state_dict(states[stop])
        torch.set_rng_state(randoms[stop])
        if stop < len(seen) - 1:
            assert [batch.tolist() for batch in resumed] == seen[stop + 1 :]
        assert [batch.tolist() for batch in resumed] == following
        assert resumed.iteration == 2


@stateful
def test_a_stream_that_remembers_is_not_read_again() -> None:
    loader = made("stream", 1)
    for _ in range(3):
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
        break
    resumed = made("stream", 1)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22]]
    assert resumed.dataset.read == 23 - 12


def dispatched() -> tuple[list[Any], list[Any]]:
    def loader() -> Any:
        return prepare_data_loader(DataLoader(Remembering(23), 3), put_on_device=True, use_stateful_dataloader=True)

    first = loader()
    seen, states = [], []
    for batch in first:
        seen.append(batch.tolist())
        states.append(first.state_dict())
    rests = []
    for state in states[:-1]:
        again = loader()
        again.load_state_dict(state)
        rests.append([batch.tolist() for batch in again])
    return seen, rests


@stateful
@pytest.mark.xdist_group("processes")
def test_a_loader_that_the_main_process_reads_for_all(processes: Callable[[int], Processes]) -> None:
    results = processes(2).run(dispatched)
    for seen, rests in results:
        # What fills the end is taken from the first batch that was read after going on, so it is left out here.
        assert [rest[:-1] for rest in rests] == [seen[stop:-1] for stop in range(1, len(seen))]
        assert {len(rest[-1]) for rest in rests} == {len(seen[-1])}
    assert results[0][0][-1] + results[1][0][-1] == [18, 19, 20, 21, 22, 0]


@stateful
def test_states_of_other_loaders_are_refused() -> None:
    with pytest.raises(TrainingError, match="torchdata reads: False"):
        made("map", 1).load_state_dict(prepare_data_loader(DataLoader(range(3))).state_dict())
    shuffled = prepare_data_loader(DataLoader(range(3), shuffle=True), use_seedable_sampler=True)
    with pytest.raises(TrainingError, match="a seedable sampler: True"):
        prepare_data_loader(DataLoader(range(3))).load_state_dict(shuffled.state_dict())


def test_without_torchdata_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bigmodel\[stateful\]'"):
        made("map", 1)
