"""Arithmetic on the CPU runs on mapped pages of the checkpoint where it can: nothing is copied, and everything stays right."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bigmodel
import bigmodel.dispatch.group as group
import bigmodel.dispatch.schedule as schedule
from bigmodel.dispatch import LazyTensor, placement, undispatch, update_parameter
from bigmodel.errors import CheckpointError

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.up.weight.mul_(2)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _small_groups_too(monkeypatch):
    monkeypatch.setattr(schedule, "_AHEAD_BYTES", 0)
    monkeypatch.setattr(group, "SMALL_BYTES", 0)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def pair(request, tmp_path) -> tuple[Model, Model, Path]:
    """The plain model, the same with its blocks on disk, and the checkpoint's file."""
    torch.manual_seed(0)
    plain = Model().to(request.param).eval()
    file = tmp_path / "model.safetensors"
    for padding in range(0, 64, 8):  # the bytes begin where kernels for float32 give the same bits
        save_file(plain.state_dict(), file, {"padding": "." * padding} if padding else None)
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 16 == 0:
            break
    return plain, offloaded(file, request.param), file


def offloaded(file: Path, dtype: torch.dtype) -> Model:
    with bigmodel.init_empty_weights():
        model = Model().to(dtype).eval()
    return bigmodel.load_checkpoint_and_dispatch(model, file, device_map={"": "disk"})


def inputs(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, WIDTH).to(next(model.parameters()).dtype)


@torch.no_grad()
def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def test_forwards_are_the_plain_models_and_move_nothing(pair):
    plain, model, _ = pair
    x = inputs(plain)
    for _ in range(3):
        assert torch.equal(run(model, x), run(plain, x))
    table = placement(model)
    assert table.bytes_moved == 0
    assert table.pool_bytes == {"cpu": 0}
    assert all(row.counters.forwards == 3 for row in table.rows)
    assert sum(row.counters.misses for row in table.rows) <= 4
    assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())


def test_without_mapping_the_same(pair, monkeypatch):
    plain, _, file = pair
    monkeypatch.setenv("BIGMODEL_MAP_FILES", "0")
    x = inputs(plain)
    model = offloaded(file, x.dtype)
    for _ in range(2):
        assert torch.equal(run(model, x), run(plain, x))
    assert placement(model).bytes_moved > 0


def test_a_forward_that_writes_to_its_weights(pair):
    plain, model, file = pair
    before = load_file(file)
    other = offloaded(file, inputs(plain).dtype)
    expected_of_other = run(plain, inputs(plain))
    for each in (plain, model):
        each.blocks[1].writes = True
    for _ in range(3):
        assert torch.equal(run(model, inputs(plain)), run(plain, inputs(plain)))
    assert torch.equal(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    assert all(torch.equal(value, before[name]) for name, value in load_file(file).items())
    assert torch.equal(run(other, inputs(plain)), expected_of_other)


def test_values_that_are_replaced(pair):
    plain, model, _ = pair
    run(model, inputs(plain))
    for each in (plain, model):
        update_parameter(each, "blocks.2.down.weight", torch.full((WIDTH, 2 * WIDTH), 0.25))
        with torch.no_grad():
            each.blocks[0].norm.bias.add_(1)
    for _ in range(2):
        assert torch.equal(run(model, inputs(plain)), run(plain, inputs(plain)))


def test_copies_are_independent(pair):
    plain, model, _ = pair
    expected = run(plain, inputs(plain))
    run(model, inputs(plain))
    twin = copy.deepcopy(model)
    twin.blocks[0].writes = True
    other = copy.deepcopy(plain)
    other.blocks[0].writes = True
    for _ in range(2):
        assert torch.equal(run(twin, inputs(plain)), run(other, inputs(plain)))
        assert torch.equal(run(model, inputs(plain)), expected)


def test_other_dtypes_are_cast_copies(pair):
    plain, model, _ = pair
    for each in (plain, model):
        each.half()
    x = inputs(plain)
    assert x.dtype == torch.float16
    assert torch.equal(run(model, x), run(plain, x))


@pytest.mark.parametrize("change", ["cut short", "written to"])
def test_a_file_that_changes_between_forwards_is_refused(pair, change):
    plain, model, file = pair
    for _ in range(2):
        run(model, inputs(plain))
    with file.open("r+b") as stream:
        if change == "cut short":
            stream.truncate(1000)
        else:
            stream.seek(2000)
            stream.write(bytes(100))
    os.utime(file, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: the file has changed"):
            run(model, inputs(plain))
    assert all(isinstance(parameter, LazyTensor) for parameter in model.parameters())


def test_gradients(pair):
    plain, model, _ = pair
    results = []
    for each in (plain, model):
        x = inputs(plain).requires_grad_()
        each(x).float().pow(2).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_a_file_that_changes_before_the_backward_is_refused(pair):
    plain, model, file = pair
    loss = model(inputs(plain).requires_grad_()).float().sum()
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="the file has changed"):
        loss.backward()


def test_undispatch_gives_memory_of_its_own(pair):
    plain, model, file = pair
    run(model, inputs(plain))
    undispatch(model)
    with file.open("r+b") as stream:
        stream.truncate(0)
    assert torch.equal(run(model, inputs(plain)), run(plain, inputs(plain)))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_threads(pair):
    plain, model, _ = pair
    x = inputs(plain)
    expected = run(plain, x)
    wrong: list[Any] = []

    def work() -> None:
        try:
            wrong.extend("differs" for _ in range(20) if not torch.equal(run(model, x), expected))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_statistics_that_a_training_forward_updates(tmp_path):
    plain = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)).train()
    file = tmp_path / "model.safetensors"
    save_file(plain.state_dict(), file)
    with bigmodel.init_empty_weights():
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)).train()
    bigmodel.load_checkpoint_and_dispatch(model, file, device_map={"": "disk"}, offload_buffers=True)
    for step in range(3):
        x = torch.randn(5, 8) + step
        assert torch.allclose(run(model, x), run(plain, x))
    assert torch.equal(model[0].running_mean, plain[0].running_mean)
    assert int(model[0].num_batches_tracked) == 3


def test_a_view_that_a_forward_returns_stays_what_it_was(pair):
    plain, model, _ = pair
    block = model.blocks[0]
    seen = []
    handle = block.up.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach()[:2]))
    run(model, inputs(plain))
    handle.remove()
    update_parameter(model, "blocks.0.up.weight", torch.zeros(2 * WIDTH, WIDTH))
    run(model, inputs(plain))
    assert torch.equal(seen[0], plain.blocks[0].up.weight[:2])


def test_the_pages_of_the_next_group_are_looked_after_while_one_computes(pair, monkeypatch):
    from bigmodel.loading import CheckpointStore

    plain, model, _ = pair
    asked: list[str] = []
    monkeypatch.setattr(CheckpointStore, "absent_pages", lambda self, names: asked.append(names[0]) or (lambda: None))
    run(model, inputs(plain))
    assert asked == [f"blocks.{index}.norm.weight" for index in range(4)]
    for _ in range(2):
        run(model, inputs(plain))
    assert set(asked[4:]) == set(asked[:4])
    # That the first group follows the last one was not known before the second forward; all others were on their way.
    assert [row.counters.misses for row in placement(model).rows] == [2, 0, 0, 0]
