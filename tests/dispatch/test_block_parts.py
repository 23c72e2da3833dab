"""Blocks that travel in parts, since the ring does not hold two of them."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatch_models import FileStore
from torch import nn
from torch.utils.checkpoint import checkpoint

import bigmodel.dispatch.schedule as schedule
from bigmodel.dispatch import LazyTensor, dispatch, dispatched, has_offloaded_params, placement, undispatch
from bigmodel.errors import DispatchError

WIDTH = 32
PROJECTION = WIDTH * WIDTH * 4
"""Bytes of one of the four projections; an mlp's matrix takes twice that, a block eight times and 256."""
BLOCK = 8 * PROJECTION + 256
CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.reads_directly = False
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = F.linear(x, self.up.weight) if self.reads_directly else self.up(x)
        if self.fails:
            raise ValueError("on purpose")
        return self.down(torch.relu(up))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(), Mlp(), nn.RMSNorm(WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x)) * self.gain
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _small_groups_too(monkeypatch):
    monkeypatch.setattr(schedule, "_AHEAD_BYTES", 0)


def offloaded(folder: Path, device: torch.device, ring_bytes: int | None) -> tuple[Model, Model, FileStore]:
    """The plain model, the same with everything on disk, and the store."""
    torch.manual_seed(0)
    plain = Model().eval()
    model = copy.deepcopy(plain)
    store = FileStore(folder, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=device, store=store, ring_bytes=ring_bytes)
    return plain, model, store


@torch.no_grad()
def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).cpu()


def names(model: nn.Module) -> list[str]:
    return [row.name for row in placement(model).rows if row.name.startswith("layers.0")]


@pytest.mark.parametrize(
    ("ring_bytes", "expected"),
    [
        (2 * BLOCK, ["layers.0"]),
        (2 * BLOCK - 1, ["layers.0", "layers.0.attention", "layers.0.mlp"]),
        (BLOCK + 512, ["layers.0", "layers.0.attention", "layers.0.mlp"]),
        (
            5 * PROJECTION,
            ["layers.0", "layers.0.attention.q … layers.0.attention.k", "layers.0.attention.v … layers.0.attention.o",
             "layers.0.mlp.up", "layers.0.mlp.down"],
        ),
        (4 * PROJECTION + 512, None),
        (2 * PROJECTION + 128, None),
    ],
)  # fmt: skip
def test_any_ring_that_holds_the_largest_leaf_is_right(tmp_path, execution_device, ring_bytes, expected):
    plain, model, _ = offloaded(tmp_path, execution_device, ring_bytes)
    x = torch.randn(2, 5, WIDTH)
    for _ in range(3):
        assert torch.equal(run(model, x), run(plain, x))
    state = dispatched(model)
    assert state is not None
    pool = state.schedule.pool(execution_device)
    assert pool.nbytes <= ring_bytes
    assert pool.overflows == 0
    assert placement(model).outside_reads == {}
    if expected is not None:
        assert names(model) == expected
    assert undispatch(model) is model
    assert not any(isinstance(parameter, LazyTensor) for parameter in model.parameters())
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_one_byte_less_than_the_largest_leaf_takes_is_refused(tmp_path, execution_device):
    smallest = 2 * PROJECTION + 128  # the leaf, and the gain that its block holds meanwhile
    with pytest.raises(
        DispatchError, match=rf"ring_bytes={smallest - 1} .*layers\.0\.mlp\.up, .*{2 * PROJECTION} bytes.*at least {smallest} "
    ):
        offloaded(tmp_path, execution_device, smallest - 1)


def test_every_part_is_fetched_once_in_a_forward_and_ahead(tmp_path, execution_device):
    _, model, _ = offloaded(tmp_path, execution_device, 5 * PROJECTION)
    x = torch.randn(2, 5, WIDTH)
    for _ in range(2):
        run(model, x)
    before = {row.name: copy.copy(row.counters) for row in placement(model).rows}
    run(model, x)
    for row in placement(model).rows:
        assert row.counters.misses == before[row.name].misses
        assert row.counters.bytes_moved - before[row.name].bytes_moved in (0, row.nbytes), row.name
    # One of the parts may still have lain in the ring from the forward before.
    assert 0 <= 3 * BLOCK - sum(row.counters.bytes_moved - before[row.name].bytes_moved for row in placement(model).rows) <= 5 * PROJECTION


def test_a_weight_that_is_read_past_its_module_is_fetched_counted_and_told(tmp_path, execution_device, caplog):
    plain, model, _ = offloaded(tmp_path, execution_device, 5 * PROJECTION)
    for each in (plain, model):
        each.layers[1].mlp.reads_directly = True
    x = torch.randn(2, 5, WIDTH)
    with caplog.at_level(logging.WARNING, logger="bigmodel"):
        for _ in range(2):
            assert torch.equal(run(model, x), run(plain, x))
    assert placement(model).outside_reads == {"layers.1.mlp.up.weight": 2}
    assert sum("layers.1.mlp.up.weight" in record.message for record in caplog.records) == 1


def test_a_failure_inside_a_part_leaves_nothing_behind(tmp_path, execution_device):
    plain, model, _ = offloaded(tmp_path, execution_device, 5 * PROJECTION)
    x = torch.randn(2, 5, WIDTH)
    for _ in range(2):
        model.layers[1].mlp.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            run(model, x)
        assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())
        model.layers[1].mlp.fails = False
        assert torch.equal(run(model, x), run(plain, x))


def test_threads_share_the_parts(tmp_path, execution_device):
    plain, model, _ = offloaded(tmp_path, execution_device, 5 * PROJECTION)
    inputs = [torch.randn(2, 5, WIDTH) for _ in range(4)]
    expected = [run(plain, x) for x in inputs]
    wrong: list[Any] = []

    def work(index: int) -> None:
        try:
            wrong.extend(index for _ in range(10) if not torch.equal(run(model, inputs[index]), expected[index]))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradients_of_inputs(tmp_path, execution_device, reentrant):
    plain, model, _ = offloaded(tmp_path, execution_device, 5 * PROJECTION)
    results = []
    x = torch.randn(2, 5, WIDTH)
    for each in (plain, model):
        own = x.clone().requires_grad_()
        output = own
        for layer in each.layers:
            output = layer(output) if reentrant is None else checkpoint(layer, output, use_reentrant=reentrant)
        output.pow(2).sum().backward()
        results.append(own.grad)
    assert torch.equal(*results)


def test_a_copy_and_writes_between_forwards(tmp_path, execution_device):
    plain, model, _ = offloaded(tmp_path, execution_device, 5 * PROJECTION)
    x = torch.randn(2, 5, WIDTH)
    run(model, x)
    twin = copy.deepcopy(model)
    for each in (plain, twin):
        with torch.no_grad():
            each.layers[0].attention.k.weight.mul_(0.5)
            each.layers[2].gain.zero_()
    assert torch.equal(run(twin, x), run(plain, x))
    assert not torch.equal(run(model, x), run(plain, x))
    assert has_offloaded_params(twin.layers[0].mlp.down)


def test_a_tie_between_parts_is_brought_by_both(tmp_path, execution_device):
    torch.manual_seed(0)
    plain = Model().eval()
    for layer in plain.layers:
        layer.attention.o.weight = plain.layers[0].attention.q.weight
    model = copy.deepcopy(plain)
    store = FileStore(tmp_path, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=execution_device, store=store, ring_bytes=5 * PROJECTION)
    x = torch.randn(2, 5, WIDTH)
    for _ in range(3):
        assert torch.equal(run(model, x), run(plain, x))
    undispatch(model)
    assert model.layers[2].attention.o.weight is model.layers[0].attention.q.weight
