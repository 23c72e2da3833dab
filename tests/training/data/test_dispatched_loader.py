"""The loader that one process reads for all, on real processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from processes import Processes, RanksFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import TrainingError
from bigmodel.training.data import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from bigmodel.training.gradient_state import GradientState
from bigmodel.training.state import PartialState

pytestmark = pytest.mark.xdist_group("processes")

Case = tuple[int, int, bool, bool, bool]


class Stream(IterableDataset[Any]):
    def __init__(self, elements: list[Any]):
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)


class OfTheMainProcess(IterableDataset[int]):
    """A stream that no other process may read."""

    def __init__(self, size: int, fails_at: int | None = None):
        self.size = size
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[int]:
        assert PartialState().is_main_process
        for index in range(self.size):
            if index == self.fails_at:
                raise OSError("the disk is gone")
            yield index


def prepared(loader: DataLoader[Any], **options: Any) -> DataLoaderDispatcher:
    loader = prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, **options)
    assert isinstance(loader, DataLoaderDispatcher)
    return loader


def looped(loader: Any) -> list[tuple[Any, bool, int]]:
    seen = []
    for batch in loader:
        assert GradientState().active_dataloader is loader
        seen.append((batch.tolist() if isinstance(batch, torch.Tensor) else batch, loader.end_of_dataloader, loader.remainder))
    assert not GradientState().in_dataloader
    return seen


def of_cases(cases: list[Case]) -> list[tuple[list[tuple[Any, bool, int]], int | None, int | None]]:
    results = []
    for size, batch_size, splits, drop_last, streams in cases:
        data: Any = OfTheMainProcess(size) if streams else range(size)
        loader = prepared(DataLoader(data, batch_size, drop_last=drop_last), split_batches=splits)
        results.append((looped(loader), loader.total_batch_size, None if streams else len(loader)))
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_size_and_batch(processes: Callable[[int], Processes], ranks: int) -> None:
    draw = random.Random(5)
    cases: list[Case] = []
    for _ in range(60):
        splits, each = draw.random() < 0.5, draw.randint(1, 4)
        cases.append((draw.randint(0, 30), each * ranks if splits else each, splits, draw.random() < 0.3, draw.random() < 0.5))
    results = processes(ranks).run(of_cases, cases)
    for case, together in zip(cases, zip(*results, strict=True), strict=True):
        size, batch_size, splits, drop_last, _ = case
        whole = batch_size if splits else batch_size * ranks
        steps = [[rank[0][step] for rank in together] for step in range(len(together[0][0]))]
        assert len({len(rank[0]) for rank in together}) == 1
        real = size - size % whole * drop_last
        assert len(steps) == -(-real // whole), case
        assert {rank[1] for rank in together} == {whole}
        assert {rank[2] for rank in together} <= {None, len(steps)}
        samples: list[int] = []
        for number, of_ranks in enumerate(steps):
            assert {(end, remainder) for _, end, remainder in of_ranks} == {(number == len(steps) - 1, of_ranks[0][2])}
            assert len({len(batch) for batch, _, _ in of_ranks}) == 1
            gathered = [sample for batch, _, _ in of_ranks for sample in batch]
            remainder = of_ranks[0][2]
            if remainder > 0:
                assert gathered[remainder:] == list(islice(cycle(range(size)), len(gathered) - remainder))
                gathered = gathered[:remainder]
            samples += gathered
        assert samples == list(range(real)), case


def texts(sizes: list[int]) -> list[Any]:
    data = [{"text": f"sample {index}", "ids": torch.full((length,), index)} for index, length in enumerate(sizes)]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        length = max(len(sample["ids"]) for sample in samples)
        ids = torch.stack([torch.nn.functional.pad(sample["ids"], (0, length - len(sample["ids"]))) for sample in samples])
        return {"text": [sample["text"] for sample in samples], "ids": ids, "more": {"nothing": None, "lengths": (ids != 0).sum(1)}}

    loader = prepared(DataLoader(Stream(data), 2, collate_fn=collate))
    return [(batch["text"], batch["ids"].tolist(), batch["more"]["nothing"], loader.remainder) for batch in loader]


def test_strings_and_uneven_lengths_are_sent_to_each_process(processes: Callable[[int], Processes]) -> None:
    one, other = processes(2).run(texts, [1, 2, 4, 3, 1, 1, 2, 2, 1])
    assert [batch[0] for batch in one] == [["sample 0", "sample 1"], ["sample 4", "sample 5"], ["sample 8"]]
    assert [batch[0] for batch in other] == [["sample 2", "sample 3"], ["sample 6", "sample 7"], ["sample 8"]]
    assert one[0][1] == [[0, 0], [1, 1]]
    assert other[0][1] == [[2, 2, 2, 2], [3, 3, 3, 0]]
    assert [batch[3] for batch in one] == [batch[3] for batch in other] == [-1, -1, 1]


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.uint8]


def of_every_dtype(large: bool) -> list[Any]:
    state = PartialState()
    batch: dict[str, Any] = {str(dtype): (torch.arange(6).reshape(2, 3) % 2).to(dtype) for dtype in DTYPES}
    batch |= {"empty": torch.zeros(2, 0), "view": torch.arange(12).reshape(2, 6)[:, ::2], "conjugate": torch.tensor([1j, 2.0]).conj()}
    if large:  # neither tensors nor words fit into the first message
        batch |= {"many": torch.arange(40_000).reshape(2, -1), "words": ["long " * 5_000, "short"]}
    loader = prepared(DataLoader(Stream([batch, batch]), batch_size=None))
    (received,) = list(loader)
    assert received.pop("words", None) == batch.pop("words", None)
    different = [
        name for name, tensor in batch.items() if received[name].dtype != tensor.dtype or received[name].tolist() != tensor.tolist()
    ]
    return [state.process_index, different, list(received) == list(batch)]


@pytest.mark.parametrize("large", [False, True])
def test_every_dtype_travels(processes: Callable[[int], Processes], large: bool) -> None:
    assert processes(2).run(of_every_dtype, large) == [[0, [], True], [1, [], True]]


def failing() -> list[int]:
    loader = prepared(DataLoader(OfTheMainProcess(10, fails_at=6), 1))
    return [batch.item() for batch in loader]


def test_an_error_in_reading_is_every_processs(processes: Callable[[int], Processes]) -> None:
    with pytest.raises(RanksFailed) as failed:
        processes(2).run(failing)
    assert isinstance(failed.value.errors[0], OSError)
    assert isinstance(failed.value.errors[1], TrainingError)
    assert "OSError: the disk is gone" in str(failed.value.errors[1])


def resumed(kind: str) -> tuple[list[Any], list[Any], list[Any]]:
    def made() -> DataLoaderDispatcher:
        if kind == "stream":
            return prepared(DataLoader(OfTheMainProcess(19), 3))
        return prepared(DataLoader(range(19), 3, shuffle=True), use_seedable_sampler=kind == "seedable", split_batches=False)

    torch.manual_seed(3)
    loader = made()
    states, randoms, seen = [], [], []
    for batch in loader:
        seen.append(batch.tolist())
        states.append(loader.state_dict())
        randoms.append(torch.get_rng_state())
        torch.rand(1)
    following = [batch.tolist() for batch in loader]
    rests = []
    for state, rng in zip(states, randoms, strict=True):
        torch.manual_seed(8)
        again = made()
        again.load_state_dict(state)
        torch.set_rng_state(rng)
        rests.append([batch.tolist() for batch in again] if state["batches"] else [])
    again.set_epoch(1)
    skipped = [batch.tolist() for batch in skip_first_batches(again, 2)] if kind != "random" else following[2:]
    assert skipped == following[2:]
    return seen, rests, following


@pytest.mark.parametrize("kind", ["stream", "seedable", "random"])
def test_the_rest_of_an_epoch(processes: Callable[[int], Processes], kind: str) -> None:
    for seen, rests, following in processes(2).run(resumed, kind):
        assert rests == [seen[stop:] for stop in range(1, len(seen) + 1)]
        assert len(following) == len(seen) == 4


def on_a_mesh() -> list[Any]:
    torch.manual_seed(PartialState().process_index)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return [
        [batch.tolist() for batch in prepared(DataLoader(range(7), 2), torch_device_mesh=mesh)],
        [batch.tolist() for batch in prepare_data_loader(DataLoader(range(12), 2, shuffle=True), torch_device_mesh=mesh)],
        [batch.tolist() for batch in prepare_data_loader(DataLoader(range(6), 2, shuffle=True), torch_device_mesh=tensor_parallel)],
        [batch.tolist() for batch in prepared(DataLoader(range(3), 2), torch_device_mesh=tensor_parallel)],
    ]


def test_processes_that_share_samples(processes: Callable[[int], Processes]) -> None:
    sent, shuffled, of_all, sent_to_all = zip(*processes(4).run(on_a_mesh), strict=True)
    assert sent == ([[0, 1], [4, 5]], [[0, 1], [4, 5]], [[2, 3], [6, 0]], [[2, 3], [6, 0]])
    assert shuffled[0] == shuffled[1] != shuffled[2] == shuffled[3]
    assert sorted(sample for rank in (0, 2) for batch in shuffled[rank] for sample in batch) == list(range(12))
    assert of_all == (of_all[0],) * 4
    assert sent_to_all == ([[0, 1], [2]],) * 4


def one_process() -> list[Any]:
    return looped(prepared(DataLoader(range(5), 2)))


def test_one_process_reads_for_itself() -> None:
    assert one_process() == [([0, 1], False, -1), ([2, 3], False, -1), ([4], True, 1)]
    with pytest.raises(TrainingError, match="batch size is 3"):
        prepare_data_loader(DataLoader(range(5), 3), num_processes=2, process_index=0, split_batches=True)


def sharded_orders() -> list[Any]:
    torch.manual_seed(PartialState().process_index)  # nobody has set one seed for all
    results = []
    for options in ({}, {"use_seedable_sampler": True}, {"rng_types": ["torch", "generator"]}):
        loader = prepare_data_loader(DataLoader(range(12), 3, shuffle=True), **options)
        results.append([[batch.tolist() for batch in loader] for _ in range(2)])
    return results


def test_all_processes_shuffle_alike(processes: Callable[[int], Processes]) -> None:
    for of_ranks in zip(*processes(2).run(sharded_orders), strict=True):
        orders = []
        for epoch in range(2):
            samples = [sample for rank in of_ranks for batch in rank[epoch] for sample in batch]
            assert sorted(samples) == list(range(12))
            orders.append(samples)
        assert orders[0] != orders[1]
