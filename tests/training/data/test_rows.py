"""Samples of nested batches, counted, cut out and joined."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from bigmodel.errors import TrainingError
from bigmodel.training.data.rows import cut_rows, flatten, join_rows, rebuild, row_count
from bigmodel.training.data.sharing import Sharing


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    tensor: torch.Tensor
    words: list[str]


def batch(start: int, stop: int) -> dict[str, Any]:
    numbers = torch.arange(start, stop)
    return {
        "pair": Pair(numbers, [str(number) for number in range(start, stop)]),
        "record": Record(numbers.half(), [f"w{number}" for number in range(start, stop)]),
        "mapping": UserDict(array=np.arange(start, stop), bytes=tuple(bytes([number]) for number in range(start, stop))),
        "ordered": OrderedDict(matrix=numbers.unsqueeze(1).expand(-1, 3)),
        "scale": torch.tensor(2.0),
        "name": "train",
        "nothing": None,
    }


def same(one: Any, other: Any) -> bool:
    ones: list[Any] = []
    others: list[Any] = []
    if repr(flatten(one, ones)) != repr(flatten(other, others)):
        return False
    return all(
        type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, (torch.Tensor, np.ndarray)) else a == b)
        for a, b in zip(ones, others, strict=True)
    )


def test_counted_cut_and_joined() -> None:
    whole = batch(0, 7)
    assert row_count(whole) == 7
    assert same(cut_rows(whole, slice(2, 5)), batch(2, 5))
    assert same(join_rows([batch(0, 3), batch(3, 4), batch(4, 7)]), whole)
    leaves: list[Any] = []
    structure = flatten(whole, leaves)
    assert same(rebuild(structure, leaves), whole)
    assert isinstance(cut_rows(whole, slice(0, 1))["record"], Record)


def test_what_does_not_fit_together_is_not_joined() -> None:
    assert join_rows([torch.zeros(2, 3), torch.zeros(2, 4)]) is None
    assert join_rows([torch.zeros(2), torch.zeros(2).half()]) is None
    assert join_rows([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}]) is None
    assert join_rows([{"a": torch.zeros(2), "loss": 1}, {"a": torch.zeros(2), "loss": 2}]) is None
    assert join_rows([torch.tensor(1), torch.tensor(2)]) is None


def test_lists_of_samples() -> None:
    ragged = [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
    assert row_count(ragged) == 3
    assert [len(sample) for sample in cut_rows(ragged, slice(1, 3))] == [3, 1]
    assert len(join_rows([ragged, ragged[:2]])) == 5
    assert row_count(["a", "b"]) == 2
    assert row_count({"one": torch.zeros(2), "other": torch.zeros(3)}) is None
    assert row_count(torch.tensor(1)) is None


def shared(groups: list[list[Any]], shares: int, splits: bool = False, keeps_start: bool = True) -> list[tuple[list[Any], int]]:
    sharing = Sharing(shares, keeps_start)
    steps = [sharing.share(group, splits) for group in groups]
    return [([piece.tolist() if isinstance(piece, torch.Tensor) else piece for piece in step.pieces], step.real) for step in steps]


def numbers(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)


def test_batches_of_one_size_are_handed_out_as_they_are() -> None:
    assert shared([[numbers(0, 2), numbers(2, 4)]], 2) == [([[0, 1], [2, 3]], 0)]
    assert shared([["text", {"any": object}]], 2) == [(["text", {"any": object}], 0)]


def test_a_short_end_is_filled_from_the_start() -> None:
    first = [numbers(0, 2), numbers(2, 4), numbers(4, 6)]
    assert shared([first, [numbers(6, 8)]], 3)[1] == ([[6], [7], [0]], 2)
    assert shared([first, [numbers(6, 8), numbers(8, 9)]], 3)[1] == ([[6], [7], [8]], 0)
    assert shared([[numbers(0, 1)]], 3) == [([[0], [0], [0]], 1)]
    assert shared([[numbers(0, 4)], [numbers(4, 5)]], 2, splits=True) == [([[0, 1], [2, 3]], 0), ([[4], [0]], 1)]
    assert shared([[numbers(0, 5)]], 2, splits=True, keeps_start=False) == [([[0, 1, 2], [3, 4, 0]], 5)]


def test_sizes_that_vary_are_evened_out() -> None:
    assert shared([[numbers(0, 1), numbers(1, 4)], [numbers(4, 6), numbers(6, 7)]], 2) == [([[0, 1], [2, 3]], 0), ([[4, 5], [6, 0]], 3)]


def test_batches_that_cannot_be_joined_stay_whole() -> None:
    first = [numbers(0, 2).unsqueeze(1), torch.tensor([[2, 2]])]
    last = [torch.tensor([[3, 3, 3]]), torch.tensor([[4, 4, 4, 4]])]
    assert shared([[first[0], first[1], first[1]], last], 3)[1] == ([[[3, 3, 3]], [[4, 4, 4, 4]], [[0], [1]]], 2)
    assert shared([[{"a": numbers(0, 2), "b": numbers(0, 3)}]], 2)[0][1] == -1
    with pytest.raises(TrainingError, match="no common number of samples cannot be split between 2"):
        shared([[{"a": numbers(0, 2), "b": numbers(0, 3)}]], 2, splits=True)


def test_another_way_to_cut() -> None:
    def every_other(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
        return batch[process_index::num_processes]

    step = Sharing(2, True, every_other).share([numbers(0, 2), numbers(2, 4)], False)
    assert [piece.tolist() for piece in step.pieces] == [[0, 2], [1, 3]]


def test_the_start_is_kept_without_the_rest_of_its_batch() -> None:
    sharing = Sharing(2, True)
    sharing.remember([torch.zeros(1000), torch.zeros(1000)])
    assert sharing.start_rows.untyped_storage().nbytes() == 8
