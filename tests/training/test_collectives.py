"""Collectives between processes: what they return, and the errors that all ranks get where one of them does not fit."""

from __future__ import annotations

import os
import warnings
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
import torch.distributed as dist
from processes import Processes, RanksFailed

from bigmodel.errors import BigModelError, TrainingError
from bigmodel.training.agreement import _by_rank
from bigmodel.training.state import PartialState
from bigmodel.utils import (
    CannotPadNestedTensorWarning,
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)


class Broken(UserDict):
    """A mapping that fails when it is read."""

    def values(self) -> Any:
        raise OSError("no values today")


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DistributedOperationException) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, BigModelError)
    return str(caught.value)


def expect_refusals() -> dict[str, str]:
    """Every kind of misfit, one after another in the same processes: after each the ranks go on together."""
    rank = dist.get_rank()
    late = rank == dist.get_world_size() - 1
    x = torch.zeros(2, 3)
    found = {
        "uneven": message_of(gather, torch.ones(1 + rank)),
        "uneven and large": message_of(gather, torch.ones(100_000 + rank)),
        "large in one rank": message_of(gather, torch.ones(100_000 if late else 1)),
        "dtype": message_of(gather, {"logits": [x, x.double() if late else x]}),
        "dimensions": message_of(gather, torch.zeros((2, 3, 1) if late else (2, 3))),
        "one more tensor": message_of(gather, [x, x] if late else [x]),
        "no tensor": message_of(gather, {"a": x, "b": None if late else x}),
        "keys": message_of(gather, {"a": x, "b" if late else "c": x}),
        "container": message_of(gather, (x, x) if late else [x, x]),
        "operation": message_of(broadcast if late else gather, x),
        "objects": message_of(gather_object if late else gather, [x]),
        "root": message_of(broadcast, x, from_process=int(late)),
        "no such rank": message_of(broadcast, x, from_process=9),
        "value": message_of(broadcast, {"a": x, "n": rank}),
        "reduction": message_of(reduce, x, "max" if late else "sum"),
        "unknown reduction": message_of(reduce, x, "median"),
        "unknown in one rank": message_of(reduce, x, "median" if late else "mean"),
        "mean of integers": message_of(reduce, torch.arange(3)),
        "sum of bools": message_of(reduce, torch.ones(2, dtype=torch.bool), "sum"),
        "scaled integers": message_of(reduce, torch.arange(3), "sum", 0.5),
        "order of complex": message_of(reduce, torch.ones(2, dtype=torch.complex64), "max"),
        "no arithmetic": message_of(reduce, torch.zeros(2, dtype=torch.uint8).view(torch.uint4), "sum"),
        "pad": message_of(pad_across_processes, torch.zeros((2, 3) if late else (2,))),
        "meta": message_of(gather, [x, torch.zeros(2, device="meta")] if late else [x, x]),
        "sparse": message_of(gather, x.to_sparse() if late else x),
        "nested": message_of(gather, torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
        "own code": message_of(gather, Broken(a=x) if late else {"a": x}),
        "list length": message_of(broadcast_object_list, [None] * (1 + rank)),
        "pickle": message_of(gather_object, [lambda: None] if late else [1]),
        "two owners": message_of(copy_tensor_to_devices, x),
    }
    assert torch.equal(gather(torch.tensor([rank])), torch.arange(dist.get_world_size()))
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_do_not_fit_all_raise_one_error(processes, count) -> None:
    told = processes(count).run(expect_refusals)
    last = count - 1
    for messages in told:
        assert messages == told[0]
    expected = {
        "uneven": "rank 0: torch.float32 [1]; rank 1: torch.float32 [2]",
        "uneven and large": "rank 0: torch.float32 [100000]; rank 1: torch.float32 [100001]",
        "large in one rank": f"rank {last}: torch.float32 [100000]",
        "dtype": f"rank {last}: torch.float64 [2, 3] at ['logits'][1]",
        "dimensions": f"rank {last}: torch.float32 [2, 3, 1]",
        "one more tensor": f"rank {last}: list of 2 ([0], [1])",
        "no tensor": f"rank {last}: NoneType at ['b']",
        "keys": f"rank{'s 0, 1' if count == 3 else ' 0'}: dict of 2 (['a'], ['c'])",
        "container": f"rank {last}: tuple of 2",
        "operation": f"rank{'s 0, 1' if count == 3 else ' 0'}: gather; rank {last}: broadcast(from_process=0)",
        "objects": f"rank {last}: gather_object",
        "root": f"rank {last}: broadcast(from_process=1)",
        "no such rank": f"there is no process 9, only 0 to {last}",
        "value": "rank 0: 0 at ['n']; rank 1: 1 at ['n']",
        "reduction": f"rank {last}: reduce(reduction='max', scale=1.0)",
        "unknown reduction": "There is no reduction 'median'; choose one of mean, sum, none, max, min",
        "unknown in one rank": f"rank {last}: There is no reduction 'median'",
        "mean of integers": "the mean of torch.int64 is not torch.int64",
        "sum of bools": "torch.bool has no sum",
        "scaled integers": "torch.int64 cannot be scaled by 0.5",
        "order of complex": "there is no max of torch.complex64",
        "no arithmetic": "torch cannot compute with torch.uint4",
        "pad": f"rank {last}: tensor with 2 dimensions",
        "meta": f"rank {last}: tensor 1 (torch.float32) is on meta",
        "sparse": f"rank {last}: tensor 0 (torch.float32) is not dense",
        "nested": "is not dense",
        "own code": f"rank {last}: the structure cannot be opened: OSError: no values today",
        "list length": "rank 1: list of 2",
        "pickle": f"rank {last}: list cannot be pickled",
        "two owners": f"there is one in ranks {list(range(count))}",
    }
    assert set(expected) == set(told[0])
    for kind, text in expected.items():
        assert text in told[0][kind], (kind, told[0][kind])
    assert "pad_across_processes" in told[0]["uneven"]
    line = message_of.__code__.co_firstlineno + 2
    ranks = ", ".join(map(str, range(count)))
    assert told[0]["uneven"].endswith(f"Called from: ranks {ranks}: {__file__}:{line} (message_of).")


def gather_what_is_special() -> None:
    rank = dist.get_rank()
    scalar = torch.tensor(float(rank))
    assert torch.equal(gather(scalar), torch.tensor([0.0, 1.0]))
    weight = torch.nn.Parameter(torch.full((1, 2), float(rank)))
    assert torch.equal(gather(weight), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    conjugate = torch.tensor([1 + 2j * rank]).conj()
    assert torch.equal(gather(conjugate), torch.tensor([1 + 0j, 1 - 2j]))
    assert gather({}) == {}
    assert gather(["only", None]) == ["only", None]
    assert gather(f"rank {rank}") == f"rank {rank}"
    assert gather(torch.zeros(0, 4)).shape == (0, 4)


def broadcast_into_what_is_special() -> None:
    rank = dist.get_rank()
    expanded = torch.full((1,), float(rank)).expand(3)
    assert torch.equal(broadcast(expanded, from_process=1), torch.ones(3))
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert broadcast(weight, from_process=1) is weight
    assert torch.equal(weight, torch.ones(2))
    assert weight.requires_grad
    columns = torch.full((3, 2), float(rank)).t()
    broadcast([columns], from_process=1)
    assert torch.equal(columns, torch.ones(2, 3))
    big = torch.full((300, 1000), float(rank), requires_grad=True)
    flipped = torch.full((1000, 300), float(rank)).t()
    conjugate = torch.full((100_000,), complex(1, rank)).conj()
    assert broadcast(conjugate, from_process=1) is conjugate
    assert torch.equal(conjugate, torch.full((100_000,), complex(1, -1)))
    data = {"big": big, "flipped": flipped, "wide": torch.tensor([float(rank)]).expand(200_000)}
    sent = broadcast(data, from_process=1)
    assert sent["big"] is big
    assert sent["flipped"] is flipped
    assert all(torch.equal(tensor, torch.ones(tensor.shape)) for tensor in sent.values())
    assert data["wide"][0].item() == rank
    with torch.inference_mode():
        frozen = torch.full((2,), float(rank))
    assert torch.equal(broadcast(frozen, from_process=1), torch.ones(2))


def reduce_what_is_special() -> None:
    rank = dist.get_rank()
    large = torch.full((2,), 40000.0, dtype=torch.float16)
    assert torch.equal(reduce(large, "mean"), large)  # the sum is beyond float16
    assert reduce(torch.tensor(float(rank)), "mean", scale=10.0).item() == 5.0
    assert reduce(torch.tensor([rank]), "sum").tolist() == [1]
    assert reduce(torch.tensor([rank > 0]), "max").tolist() == [True]
    assert reduce(torch.tensor([rank > 0]), "min").tolist() == [False]
    small = torch.tensor([0.5 * rank]).to(torch.float8_e4m3fn)
    assert reduce(small, "sum").float().item() == 0.5
    assert reduce({"loss": torch.tensor(1.0 + rank), "step": 3}, "sum") == {"loss": torch.tensor(3.0), "step": 3}
    parts = reduce([torch.ones(300_000), torch.ones(200_000)], "sum")
    assert [part.untyped_storage().nbytes() for part in parts] == [1_200_000, 800_000]


def many_megabytes() -> None:
    """More tensors than travel at once, of different dtypes, each too large to be joined with others."""
    rank = dist.get_rank()
    dtypes = [torch.float32, torch.bfloat16, torch.int32, torch.complex64, torch.float64]
    sizes = [300_000 + 7 * index for index in range(20)]

    def made(rank: int) -> list[torch.Tensor]:
        return [torch.full((size,), 3 * rank + index, dtype=dtypes[index % 5]) for index, size in enumerate(sizes)]

    for index, gathered in enumerate(gather(made(rank))):
        assert torch.equal(gathered, torch.cat([made(0)[index], made(1)[index]]))
    for index, reduced in enumerate(reduce(made(rank), "sum")):
        assert torch.equal(reduced, torch.full((sizes[index],), 3 + 2 * index, dtype=dtypes[index % 5]))
    mine = made(rank)
    sent = broadcast(mine, from_process=1)
    assert all(after is before for after, before in zip(sent, mine, strict=True))
    assert all(torch.equal(after, expected) for after, expected in zip(mine, made(1), strict=True))
    # One memory under several names: the last of them stays, as if they travelled one after another.
    memory = torch.zeros(300_000)
    shared = broadcast([torch.ones(300_000), torch.full((300_000,), 2.0)] if rank else [memory, memory], from_process=1)
    assert torch.equal(shared[1], torch.full((300_000,), 2.0))


def objects() -> None:
    rank = dist.get_rank()
    assert gather_object([f"rank {rank}", rank]) == ["rank 0", 0, "rank 1", 1]
    assert gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert gather_object("text") == ["text", "text"]
    assert gather_object([rank] * (rank + 1)) == [0, 1, 1]
    assert gather_object(["x" * 5000 * (rank + 1)]) == ["x" * 5000, "x" * 10000]
    for size in (1, 5000):
        given = [rank, "x" * size, None] if rank == 1 else [None, None, "mine"]
        assert broadcast_object_list(given, from_process=1) is given
        assert given == [1, "x" * size, None]


def copies_to_all() -> None:
    rank = dist.get_rank()
    given = torch.arange(6, dtype=torch.int16).view(2, 3) if rank == 1 else None
    copied = copy_tensor_to_devices(given)
    assert torch.equal(copied, torch.arange(6, dtype=torch.int16).view(2, 3))
    assert copied.dtype == torch.int16


def pad_what_is_special() -> None:
    rank = dist.get_rank()
    x = torch.full((rank + 1, 2), 5.0, requires_grad=True)
    padded = pad_across_processes(x, pad_index=-1)
    assert padded.tolist() == ([[5.0, 5.0], [-1.0, -1.0]] if rank == 0 else [[5.0, 5.0]] * 2)
    padded.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert pad_across_processes(x.t(), dim=-1, pad_first=True).tolist() == ([[0.0, 5.0]] * 2 if rank == 0 else [[5.0, 5.0]] * 2)
    scalar = torch.tensor(1.0)
    same = pad_across_processes({"s": scalar, "n": None, "x": x}, dim=-4)
    assert same["s"] is scalar
    assert same["x"] is x
    assert pad_across_processes([1, "a", None]) == [1, "a", None]
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(CannotPadNestedTensorWarning):
        assert pad_across_processes(nested) is nested
    many = pad_across_processes([torch.ones(rank + 1 + index) for index in range(400)])
    assert [tensor.numel() for tensor in many] == [2 + index for index in range(400)]


@pytest.mark.parametrize(
    "function",
    [
        gather_what_is_special,
        broadcast_into_what_is_special,
        reduce_what_is_special,
        many_megabytes,
        objects,
        copies_to_all,
        pad_what_is_special,
    ],
)
def test_two_processes(processes, function) -> None:
    processes(2).run(function)


def all_over_another_backend() -> None:
    """As under a backend that takes no tensors of the CPU for its frames: these travel in a group beside it."""
    PartialState().backend = "other"
    gather_what_is_special()
    broadcast_into_what_is_special()
    reduce_what_is_special()
    many_megabytes()
    objects()
    copies_to_all()
    pad_what_is_special()
    expect_refusals()


def test_frames_of_another_backend_travel_in_a_group_of_gloo(processes) -> None:
    processes(2).run(all_over_another_backend)


def collectives_on_devices() -> list[str]:
    simulator = simdev.register()
    simulator.set_up(2, ["64MiB", "64MiB"])
    state = PartialState(cpu=True)
    rank = state.process_index
    state.device = torch.device(simdev.NAME, rank)
    found = []
    for size in (3, 300_000):
        mine = torch.full((size,), rank + 1.0, device=state.device)
        gathered = gather({"x": mine, "n": None})["x"]
        assert torch.equal(gathered.cpu(), torch.tensor([1.0, 2.0]).repeat_interleave(size))
        reduced = reduce([mine])[0]
        assert torch.equal(reduced.cpu(), torch.full((size,), 1.5))
        padded = pad_across_processes(mine[: size - rank], pad_index=7)
        assert padded[-1].item() == (1.0, 7.0)[rank]
        assert broadcast(mine, from_process=1) is mine
        assert torch.equal(mine.cpu(), torch.full((size,), 2.0))
        copied = copy_tensor_to_devices(mine if rank == 0 else None)
        assert torch.equal(copied.cpu(), torch.full((size,), 2.0))
        found += [str(tensor.device) for tensor in (gathered, reduced, padded, copied)]
    return found


def test_tensors_of_accelerators_come_back_to_them(accelerators) -> None:
    accelerators(1)  # builds the simulator before the processes want it
    processes = Processes(2)
    try:
        assert processes.run(collectives_on_devices) == [["sim:0"] * 8, ["sim:1"] * 8]
    finally:
        processes.close()  # torch knows the device in them for good


def test_many_ranks_are_told_in_short() -> None:
    assert _by_rank(["a"] * 500 + ["b"]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, …: a; rank 500: b"
    assert _by_rank([f"shape {rank}" for rank in range(20)]).endswith("rank 7: shape 7; and 12 more")


def gather_after_a_rank_has_ended(file: str) -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index == 1:
        os._exit(1)
    Path(file).write_text(message_of(gather, torch.ones(1)))


def test_a_rank_that_has_ended_is_told_to_the_others(processes, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        processes(2).run(gather_after_a_rank_has_ended, str(tmp_path / "told"))
    told = (tmp_path / "told").read_text()
    assert told.startswith("gather, called from ")
    assert "test_collectives.py:" in told
    assert "did not reach every rank: one of them has ended" in told


def waits_for_ever() -> None:
    gather(torch.ones(2) if dist.get_rank() else torch.ones(3))


def test_a_misfit_ends_at_once(processes) -> None:
    with pytest.raises(RanksFailed) as caught:
        processes(2).run(waits_for_ever, timeout=10)
    assert [type(error) for error in caught.value.errors.values()] == [DistributedOperationException] * 2


@dataclass
class Batch:
    ids: torch.Tensor
    name: str


class TestOneProcess:
    """Nothing travels: what is given comes back."""

    @pytest.fixture(autouse=True)
    def alone(self):
        PartialState._reset_state()
        yield
        PartialState._reset_state()

    def test_data_come_back_as_they_are(self) -> None:
        data = {"x": torch.tensor(1.0), "n": 3, "batch": Batch(torch.ones(2), "a")}
        assert gather(data) is data
        assert broadcast(data) is data
        assert pad_across_processes(data) is data
        assert gather_object(data) is data
        assert broadcast_object_list([1, 2]) == [1, 2]
        assert copy_tensor_to_devices(data["x"]).item() == 1.0

    def test_reduce_makes_a_copy(self) -> None:
        x = torch.tensor([1, 2])
        reduced = reduce({"x": x, "n": None})
        assert torch.equal(reduced["x"], x)
        assert reduced["x"] is not x
        assert reduced["x"].data_ptr() != x.data_ptr()
        assert reduce(torch.tensor([1.0]), "sum", 3.0).item() == 3.0
        with pytest.raises(TrainingError, match="choose one of mean, sum, none, max, min"):
            reduce(x, "median")
        with pytest.raises(TrainingError, match="cannot be scaled"):
            reduce(x, "sum", 0.5)

    def test_nested_tensors_are_not_padded(self) -> None:
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        with pytest.warns(CannotPadNestedTensorWarning):
            assert pad_across_processes(nested) is nested
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pad_across_processes(torch.ones(2))
