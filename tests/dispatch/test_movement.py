"""Finding and moving tensors in nested structures."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigmodel.dispatch import find_device, send_to_device

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    name: str


def test_find_device() -> None:
    assert find_device([1, "a", {"x": (None, torch.zeros(1))}]) == torch.device("cpu")
    assert find_device({"a": [1]}) is None
    assert find_device(torch.zeros(1, device="meta")) == torch.device("meta")


def test_send_to_device_keeps_types(accelerators) -> None:
    (device,) = accelerators(1)
    x = torch.zeros(2)
    data: dict[str, Any] = {
        "list": [x, 1],
        "tuple": (x, "a"),
        "pair": Pair(x, None),
        "ordered": OrderedDict(a=x),
        "user": UserDict(a=x),
        "default": defaultdict(list, a=x),
        "fields": Batch(x, "first"),
        "other": SimpleNamespace(x=x),
    }
    sent = send_to_device(data, device)
    assert sent["list"][0].device == device
    assert sent["list"][1] == 1
    assert type(sent["pair"]) is Pair
    assert sent["pair"].first.device == device
    assert type(sent["ordered"]) is OrderedDict
    assert sent["user"]["a"].device == device
    assert type(sent["user"]) is UserDict
    assert sent["default"]["a"].device == device
    assert sent["default"]["b"] == []
    assert sent["fields"].ids.device == device
    assert sent["fields"].name == "first"
    assert sent["other"] is data["other"]
    assert data["list"][0].device.type == "cpu"


@pytest.mark.parametrize("skip_keys", ["a", ["a", "b"]])
def test_send_to_device_skips_keys_at_any_depth(accelerators, skip_keys) -> None:
    (device,) = accelerators(1)
    x = torch.zeros(2)
    sent = send_to_device({"a": x, "c": {"a": x, "d": x}}, device, skip_keys=skip_keys)
    assert sent["a"] is x
    assert sent["c"]["a"] is x
    assert sent["c"]["d"].device == device


def test_send_to_device_of_objects_that_only_know_a_device() -> None:
    class Old:
        def to(self, device: Any) -> str:
            return f"moved to {device}"

    assert send_to_device([Old()], "cpu", non_blocking=True) == ["moved to cpu"]


def test_send_to_device_compiles_without_a_break() -> None:
    function = torch.compile(lambda x: send_to_device({"x": x, "y": [x]}, torch.device("cpu"))["y"][0] + 1, fullgraph=True, backend="eager")
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))
