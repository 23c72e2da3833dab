"""Containers beside lists, tuples and mappings: deques are walked; what cannot be put together again is refused before a collective."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigmodel.structures import children, keys, rebuilt
from bigmodel.training.agreement import Visit
from bigmodel.utils import find_batch_size, recursively_apply, send_to_device

ONE = torch.ones(2, 3)


def test_deques_are_walked_and_keep_their_length() -> None:
    data = deque([ONE, "word", [ONE]], maxlen=3)
    doubled = recursively_apply(lambda tensor: tensor * 2, data)
    assert type(doubled) is deque
    assert doubled.maxlen == 3
    assert doubled[1] == "word"
    assert len(data) == 3
    assert data[0] is ONE
    assert doubled[0].equal(ONE * 2)
    assert doubled[2][0].equal(ONE * 2)
    assert send_to_device({"a": data}, "meta")["a"][0].is_meta
    assert find_batch_size(data) == 2
    assert list(children(data) or ()) == list(data)
    assert list(keys(data)) == ["[0]", "[1]", "[2]"]
    assert rebuilt(deque(), []) == deque()


@pytest.mark.parametrize(("data", "kind"), [
    ({ONE}, "a set"),
    ([frozenset([ONE])], "a frozenset"),
    ({"a": {"b": ONE}.values()}, "a dict_values"),
    ((each for each in [ONE]), "a generator"),
    ([map(torch.sum, [ONE])], "a map"),
    (zip([ONE], [ONE], strict=True), "a zip"),
])  # fmt: skip
def test_tensors_that_would_be_left_out_are_refused(data: Any, kind: str) -> None:
    visit = Visit("gather")
    visit.open(data)
    assert visit.problem == f"the structure cannot be opened: StructureError: tensors of {kind} would be left out: make it a list"


@pytest.mark.parametrize("data", [{1, 2}, frozenset(["a"]), {"a": 1}.values(), SimpleNamespace(x=ONE), range(3), None, b"x"])
def test_leaves_without_tensors_stay(data: Any) -> None:
    visit = Visit("gather")
    visit.open([data, ONE])
    assert visit.problem is None
    assert visit.tensors == [ONE]
