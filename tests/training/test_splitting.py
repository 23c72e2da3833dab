"""Shares of inputs: together they are all of it, in order, and with padding all are as long as the longest."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.errors import TrainingError
from bigmodel.training.splitting import share_bounds, share_of

COUNTS = st.integers(2, 9)

KINDS = {
    "list": list,
    "tuple": tuple,
    "tensor": lambda items: torch.tensor(items, dtype=torch.int64).reshape(-1, 1).expand(-1, 3),
    "numpy": lambda items: numpy.array(items, dtype=numpy.int64).reshape(-1, 1),
}


def plain(values: Any) -> list[Any]:
    """Items to compare, of whatever kind `values` is."""
    return [item.tolist() if hasattr(item, "tolist") else item for item in values]


@settings(deadline=None)
@given(st.integers(0, 60), COUNTS)
def test_shares_are_consecutive_and_even(length: int, count: int) -> None:
    bounds = [share_bounds(length, rank, count) for rank in range(count)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert sorted(sizes, reverse=True) == sizes
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(length=st.integers(0, 40), count=COUNTS)
def test_every_kind_is_cut_and_padded(kind: str, length: int, count: int) -> None:
    whole = KINDS[kind](list(range(length)))
    shares = [share_of(whole, rank, count) for rank in range(count)]
    assert {type(share) for share in shares} == {type(whole)}
    assert [item for share in shares for item in plain(share)] == plain(whole)
    padded = [share_of(whole, rank, count, apply_padding=True) for rank in range(count)]
    assert {type(share) for share in padded} == {type(whole)}
    assert {len(share) for share in padded} == {-(-length // count)}
    for share, longer in zip(shares, padded, strict=True):
        assert plain(longer)[: len(share)] == plain(share)
        assert plain(longer)[len(share) :] == plain(whole)[-1:] * (len(longer) - len(share))


def test_one_process_has_the_inputs_themselves() -> None:
    inputs = iter([1, 2])
    assert share_of(inputs, 0, 1) is inputs
    mapping = {"a": [1, 2], "b": (3, 4)}
    assert share_of(mapping, 0, 1, apply_padding=True) == mapping


def test_a_range_is_cut_and_padded_to_a_list() -> None:
    assert [share_of(range(5), rank, 2) for rank in (0, 1)] == [range(3), range(3, 5)]
    assert share_of(range(5), 1, 2, apply_padding=True) == [3, 4, 4]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_a_mapping_is_cut_by_its_values(kind: Any) -> None:
    inputs = kind({"ids": torch.arange(6).reshape(3, 2), "words": ["a", "b", "c"], "name": "xyz"})
    first, second = (share_of(inputs, rank, 2, apply_padding=True) for rank in (0, 1))
    assert type(first) is type(second) is kind
    assert (first["ids"].tolist(), first["words"], first["name"]) == ([[0, 1], [2, 3]], ["a", "b"], "xyz")
    assert (second["ids"].tolist(), second["words"], second["name"]) == ([[4, 5], [4, 5]], ["c", "c"], "xyz")
    assert list(first) == ["ids", "words", "name"]


def test_a_mapping_with_a_default_keeps_it() -> None:
    inputs = defaultdict(list, a=[1, 2, 3])
    share = share_of(inputs, 0, 2)
    assert share == {"a": [1, 2]}
    assert share["other"] == []


class Table:
    """What `datasets` has: a slice is a dictionary of columns."""

    def __init__(self, rows: list[int]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: slice) -> dict[str, list[int]]:
        return {"rows": self.rows[key]}

    def select(self, indices: list[int]) -> Table:
        return Table([self.rows[index] for index in indices])


def test_a_table_is_cut_into_tables() -> None:
    table = Table([10, 11, 12, 13, 14])
    assert [share_of(table, rank, 3).rows for rank in range(3)] == [[10, 11], [12, 13], [14]]
    assert [share_of(table, rank, 3, apply_padding=True).rows for rank in range(3)] == [[10, 11], [12, 13], [14, 14]]


@pytest.mark.parametrize(("inputs", "message"), [
    ({"a": [1], "b": [1, 2]}, r"different lengths cannot be split together: \{'a': 1, 'b': 2\}"),
    (iter([1]), "list_iterator has no length"),
    ({"a": 1}, "int has no length"),
    (torch.tensor(1), "Tensor has no length"),
    ({1, 2}, "set has no slices"),
    ({"a": {"b": [1]}}, "dict has no slices"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(inputs: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        share_of(inputs, 0, 2)


@pytest.mark.parametrize("text", ["a prompt", b"bytes", ""])
def test_a_text_goes_to_all_as_it_is(text: str | bytes) -> None:
    assert [share_of(text, rank, 3) for rank in range(3)] == [text] * 3
    shares = [share_of({"prompt": ["a", "b", "c"], "style": text}, rank, 3, apply_padding=True) for rank in range(3)]
    assert shares == [{"prompt": [each], "style": text} for each in "abc"]
