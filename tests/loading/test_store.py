"""The disk tier: values come from the checkpoint, new ones stay beside it, and the file is never touched."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, CheckpointStore, init_empty_weights, match, materialize
from bigmodel.protocols import Read, Store, TensorSpec


@pytest.fixture
def store(saved: Path, tied: type[nn.Module]) -> CheckpointStore:
    with init_empty_weights():
        model = tied(torch.bfloat16)
    report = materialize(model, match(model, Checkpoint.open(saved)), {"": "disk"}, offload_buffers=True)
    assert report.store is not None
    return report.store


def read(store: CheckpointStore, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    spec = store.spec(name)
    destination = torch.empty(spec.shape, dtype=dtype or spec.dtype)
    store.read_into([Read(name, destination)])
    return destination


def test_it_is_a_store(store: CheckpointStore) -> None:
    assert isinstance(store, Store)
    assert store.kind == "disk"
    assert "block.0.weight" in store.names()
    assert "head.weight" not in store.names()
    assert store.spec("embed.weight") == TensorSpec((40, 16), torch.bfloat16)
    with pytest.raises(KeyError):
        store.spec("nothing")


def test_values_in_the_models_dtype_and_in_others(store: CheckpointStore, filled: nn.Module) -> None:
    state = filled.state_dict()
    for name in store.names():
        expected = state[name].to(store.spec(name).dtype)
        assert torch.equal(read(store, name), expected)
        if expected.is_floating_point():
            assert torch.equal(read(store, name, torch.float32), expected.float())


def test_several_at_once(store: CheckpointStore, filled: nn.Module) -> None:
    reads = [Read(name, torch.empty(store.spec(name).shape, dtype=store.spec(name).dtype)) for name in store.names()]
    store.read_into(reads)
    for each in reads:
        assert torch.equal(each.destination, filled.state_dict()[each.name].to(each.destination.dtype))


@pytest.mark.parametrize("rows", [[0], [3, 4, 5, 4, 4], [39, 0, 38, 39], []])
def test_rows(store: CheckpointStore, filled: nn.Module, rows: list[int]) -> None:
    destination = torch.empty(len(rows), 16)
    store.read_rows("embed.weight", torch.tensor(rows, dtype=torch.int64), destination)
    assert torch.equal(destination, filled.embed.weight[rows].bfloat16().float())
    for wrong in (-1, 40):
        with pytest.raises(IndexError, match="rows 0 to 39"):
            store.read_rows("embed.weight", torch.tensor([wrong]), torch.empty(1, 16))


def test_written_values_are_read_and_the_file_is_untouched(store: CheckpointStore, saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    value = torch.randn(40, 16)
    store.write("embed.weight", value)
    value.zero_()
    stored = read(store, "embed.weight")
    assert stored.dtype == torch.bfloat16
    assert stored.abs().sum() > 0
    destination = torch.empty(2, 16)
    store.read_rows("embed.weight", torch.tensor([7, 7]), destination)
    assert torch.equal(destination, stored[[7, 7]].float())
    assert (saved / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match=r"\[40, 16\].*\[2\]"):
        store.write("embed.weight", torch.ones(2))
    with pytest.raises(KeyError):
        store.write("nothing", torch.ones(2))


def test_what_is_read_is_the_callers_own(store: CheckpointStore) -> None:
    store.write("embed.weight", torch.ones(40, 16))
    read(store, "embed.weight").zero_()
    assert torch.equal(read(store, "embed.weight"), torch.ones(40, 16, dtype=torch.bfloat16))


def test_copies_are_independent(store: CheckpointStore, filled: nn.Module) -> None:
    store.write("steps", torch.tensor([7, 8, 9]))
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        twin.write("embed.weight", torch.zeros(40, 16))
        assert torch.equal(read(twin, "steps"), torch.tensor([7, 8, 9]))
        assert torch.equal(read(store, "embed.weight"), filled.embed.weight.bfloat16())


def test_a_file_that_changed_is_refused(store: CheckpointStore, saved: Path) -> None:
    os.utime(saved / "model.safetensors", ns=(0, 0))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file has changed"):
        read(store, "embed.weight")


def test_a_file_that_is_replaced_while_it_is_open_goes_on_giving_its_old_values(
    store: CheckpointStore, saved: Path, filled: nn.Module
) -> None:
    read(store, "embed.weight")
    (saved / "new").write_bytes(bytes(100))
    os.replace(saved / "new", saved / "model.safetensors")
    assert torch.equal(read(store, "embed.weight"), filled.embed.weight.bfloat16())
    store.close()
    with pytest.raises(CheckpointError, match="has 100 now"):
        read(store, "embed.weight")
