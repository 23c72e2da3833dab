"""What containers hold, and the same containers around other values."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from bigmodel.structures import children, is_namedtuple, keys, rebuilt

Pair = namedtuple("Pair", "first second")


class Typed(NamedTuple):
    first: int
    second: int


class Named(Pair):
    """A class made from a namedtuple."""


class Numbers(list):
    """A list with a name of its own."""


@dataclass
class Batch:
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Fixed:
    first: Any
    second: Any


def test_namedtuples_and_what_is_made_from_them() -> None:
    assert all(map(is_namedtuple, [Pair(1, 2), Typed(1, 2), Named(1, 2)]))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple([1, 2])


CONTAINERS = [
    (1, 2),
    [1, 2],
    Numbers([1, 2]),
    Pair(1, 2),
    Typed(1, 2),
    Named(1, 2),
    {"first": 1, "second": 2},
    OrderedDict(first=1, second=2),
    UserDict(first=1, second=2),
    defaultdict(list, first=1, second=2),
    Batch(1, 2),
    Fixed(1, 2),
]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: type(container).__name__)
def test_containers_are_rebuilt_with_their_types(container) -> None:
    assert list(children(container)) == [1, 2]
    changed = rebuilt(container, [3, 4])
    assert type(changed) is type(container)
    assert list(children(changed)) == [3, 4]
    assert list(children(container)) == [1, 2]
    assert list(keys(changed)) == list(keys(container))
    assert rebuilt(container, [1, 2]) == container


def test_an_immutable_mapping_is_made_anew() -> None:
    assert rebuilt(MappingProxyType({"a": 1}), [2]) == MappingProxyType({"a": 2})


def test_what_else_a_container_holds_comes_along() -> None:
    assert rebuilt(defaultdict(list, a=1), [2])["unknown"] == []
    user = UserDict(a=1)
    user.encodings = "kept"
    assert rebuilt(user, [2]).encodings == "kept"
    output = rebuilt(BaseModelOutput(last_hidden_state=torch.zeros(1)), [torch.ones(1)])
    assert output.last_hidden_state is output["last_hidden_state"] is output[0]
    assert output[0].item() == 1
    batch = Batch(1, 2)
    assert rebuilt(batch, [1, 2]) is batch


def test_paths_are_written_as_python_reaches_them() -> None:
    assert list(keys([5, 6])) == ["[0]", "[1]"]
    assert list(keys({"a": 1, 3: 2})) == ["['a']", "[3]"]
    assert list(keys(Pair(1, 2))) == list(keys(Batch(1, 2))) == [".first", ".second"]


@pytest.mark.parametrize("leaf", [None, 1, 2.5, "text", b"bytes", torch.ones(2), Batch, {1, 2}, object()])
def test_everything_else_is_not_opened(leaf) -> None:
    assert children(leaf) is None
