"""torch.compile of blocks whose weights move: hooks stay outside of what is compiled, and steps and blocks share it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch._dynamo
from dispatch_models import FileStore
from torch import nn
from torch._dynamo.testing import CompileCounter

from bigmodel.dispatch import dispatch, placement

WIDTH = 32
LEAF_BYTES = 2 * WIDTH * WIDTH * 4
DEPTH = 12
"""More blocks than the compiler makes versions of one function."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("ring_bytes", "graphs"), [(None, 1), (2 * LEAF_BYTES, 3)], ids=["whole blocks", "in parts"])
def test_steps_and_blocks_share_what_was_compiled(tmp_path: Path, ring_bytes: int | None, graphs: int, caplog) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Model().eval()
    model = copy.deepcopy(plain)
    store = FileStore(tmp_path, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    dispatch(model, {"": "disk"}, main_device=torch.device("cpu"), store=store, ring_bytes=ring_bytes)
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter)
    compiled = []
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 5, WIDTH)
            assert torch.equal(model(x), plain(x))
            compiled.append(counter.frame_count)
    assert compiled[1:] == [compiled[0]] * 3
    assert 1 <= compiled[0] <= graphs
    assert placement(model).outside_reads == {}
    assert not any("recompile_limit" in record.getMessage() for record in caplog.records)
    torch._dynamo.reset()


def dispatched_to_disk(folder: Path) -> tuple[Model, Model]:
    """The plain model, and the same with everything on disk."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Model().eval()
    model = copy.deepcopy(plain)
    store = FileStore(folder, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    return plain, dispatch(model, {"": "disk"}, main_device=torch.device("cpu"), store=store)


def test_one_graph_for_each_block_whose_weights_move(tmp_path: Path) -> None:
    plain, model = dispatched_to_disk(tmp_path)
    for layer in model.layers:
        layer._old_forward = torch.compile(layer._old_forward, fullgraph=True, backend="eager")
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))


def test_one_graph_for_a_model_whose_weights_move_is_refused_with_what_to_do(tmp_path: Path) -> None:
    plain, model = dispatched_to_disk(tmp_path)
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"block\.compile\(fullgraph=True\)"):
            torch.compile(model, fullgraph=True, backend="eager")(x)
        torch._dynamo.reset()
        assert torch.equal(model(x), plain(x))
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="eager")
        assert torch.equal(model(x), plain(x))
    torch._dynamo.reset()
