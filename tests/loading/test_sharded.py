"""Several processes, one model: every process gets its values, and all together read the files about once."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed
from processes import Processes
from safetensors.torch import save_file
from torch import nn

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, SameNames, exchange, init_empty_weights, load, load_checkpoint_in_model, load_together

WIDTH = 1024


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x)) * self.scale


def filled() -> Net:
    torch.manual_seed(0)
    return Net()


def empty() -> Net:
    with init_empty_weights():
        return Net()


class Counted:
    """Counts the bytes that this process reads from files by positioned reads."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._real = os.preadv

    def __enter__(self) -> Counted:
        def preadv(descriptor: int, buffers: list[memoryview], *rest: int) -> int:
            count = self._real(descriptor, buffers, *rest)
            self.nbytes += count
            return count

        os.preadv = preadv
        return self

    def __exit__(self, *problem: object) -> None:
        os.preadv = self._real

    def of_all(self) -> list[int]:
        found: list[int] = [0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, self.nbytes)
        return found


def assert_values(model: nn.Module) -> None:
    expected = filled().state_dict()
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, expected[name]), name


def assert_forward(model: nn.Module) -> None:
    ids = torch.arange(7)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), filled()(ids))


def shared_reads(folder: str) -> None:
    size = sum(value.nbytes for name, value in filled().state_dict().items() if name != "head.weight")
    for model in (empty(), Net()):
        with Counted() as counted:
            load_together(model, folder)
        assert_values(model)
        assert model.head.weight is model.embed.weight
        assert_forward(model)
        each = counted.of_all()
        assert sum(each) < 1.1 * size
        assert max(each) < 1.03 * size / len(each)


def equal_shares(folder: str) -> None:
    """Whatever the order of large and small tensors."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    models: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8), 2, enable_nested_tensor=False),
        lambda: nn.Sequential(nn.Embedding(30522, 256), *(nn.Linear(256, 256) for _ in range(4)), nn.LayerNorm(256)),
    ]
    for number, build in enumerate(models):
        file = Path(folder) / f"{number}-of-{count}.safetensors"
        state = build().state_dict()
        if rank == 0:
            save_file(state, file)
        torch.distributed.barrier()
        with init_empty_weights():
            model = build()
        with Counted() as counted:
            load_together(model, file)
        each = counted.of_all()
        size = sum(value.nbytes for value in state.values())
        assert max(each) < 1.03 * size / count, (number, each)
        assert min(each) > 0.97 * size / count, (number, each)
        sent = [None if rank else state]
        torch.distributed.broadcast_object_list(sent, src=0)
        assert all(torch.equal(value, sent[0][name]) for name, value in model.state_dict().items())


def rank0_reads(folder: str) -> None:
    rank = torch.distributed.get_rank()
    for model in (empty(), Net()):
        with Counted() as counted:
            load_checkpoint_in_model(model, folder if rank == 0 else f"{folder}/nowhere", broadcast_from_rank0=True)
        assert_values(model)
        assert counted.of_all()[1:] == [0] * (torch.distributed.get_world_size() - 1)


def fully_sharded(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    size = sum(value.nbytes for name, value in filled().state_dict().items() if name != "head.weight")
    ways: list[Callable[[nn.Module], object]] = [
        lambda model: load(model, Checkpoint.open(folder)),
        lambda model: load_checkpoint_in_model(model, folder),
        lambda model: load_together(model, folder),
        lambda model: load_checkpoint_in_model(
            model, folder if torch.distributed.get_rank() == 0 else "nowhere", broadcast_from_rank0=True
        ),
    ]
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for way in ways:
        for model in (empty(), Net()):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            with Counted() as counted:
                way(model)
            assert sum(counted.of_all()) < 1.1 * size
            assert_values(model)
            assert_forward(model)


def tensor_parallel(folder: str) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = empty()
    styles = {f"layers.{n}": ColwiseParallel(output_layouts=None) if n % 2 else RowwiseParallel() for n in range(4)}
    parallelize_module(model, mesh, styles)
    with Counted() as counted:
        load_checkpoint_in_model(model, folder)
    # Rows of a file are read alone. Columns of rows of 4 KiB are read faster with what lies between them.
    layer = 4 * WIDTH * WIDTH
    assert max(counted.of_all()) < 2 * layer + 2 * layer / torch.distributed.get_world_size() + (1 << 20)
    assert_values(model)


def tensor_parallel_columns(folder: str) -> None:
    """Parts of rows of 32 KiB and more are read alone."""
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh("cpu", (count,))
    whole = torch.arange(96 * (8 << 10) * count, dtype=torch.float32).view(96, -1)
    file = Path(folder) / f"columns-{count}.safetensors"
    if rank == 0:
        save_file({"0.weight": whole}, file)
    torch.distributed.barrier()
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(whole.shape[1], 96, bias=False))
    parallelize_module(model, mesh, {"0": RowwiseParallel()})
    with Counted() as counted:
        load_checkpoint_in_model(model, file)
    assert set(counted.of_all()) == {whole.nbytes // count}
    assert torch.equal(model[0].weight.full_tensor(), whole)


def failing(folder: str) -> None:
    rank = torch.distributed.get_rank()
    model = empty()
    try:
        load_together(model, folder if rank != 1 else f"{folder}/nowhere")
    except CheckpointError as error:
        told = str(error)
        assert "nowhere" in told
        assert rank == 1 or "Rank 1" in told
    else:
        raise AssertionError("an error in another process was not noticed")
    assert all(parameter.is_meta for parameter in model.parameters())


def failing_rules(folder: str) -> None:
    class Broken(SameNames):
        def sources(self, *args: object, **kwargs: object) -> NoReturn:
            raise LookupError("a rule of the caller's own")

    rank = torch.distributed.get_rank()
    model = empty()
    with pytest.raises(LookupError if rank == 1 else CheckpointError, match="a rule of the caller's own") as caught:
        load_together(model, folder, rules=Broken() if rank == 1 else None)
    assert rank == 1 or "Rank 1 could not load: LookupError" in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def without_memory(folder: str) -> None:
    rank = torch.distributed.get_rank()
    model = empty()
    real = exchange.empty_tensor

    def refused(*args: object) -> NoReturn:
        raise RuntimeError("not enough memory")

    exchange.empty_tensor = refused if rank == 1 else real
    try:
        with pytest.raises(RuntimeError if rank == 1 else CheckpointError, match="not enough memory"):
            load_together(model, folder)
    finally:
        exchange.empty_tensor = real
    assert all(parameter.is_meta for parameter in model.parameters())


def progress_is_told(folder: str) -> None:
    """One bar, and the callback in every process; an error in it is an error in all."""
    rank = torch.distributed.get_rank()
    size = sum(value.nbytes for name, value in filled().state_dict().items() if name != "head.weight")
    for way in (load_together, partial(load_checkpoint_in_model, broadcast_from_rank0=True)):
        heard: list[tuple[int, int]] = []
        screen = io.StringIO()
        with contextlib.redirect_stderr(screen):
            way(empty(), folder, progress=True, progress_callback=lambda *told, heard=heard: heard.append(told))
        assert heard[-1] == (size, size)
        assert [done for done, _ in heard] == sorted({done for done, _ in heard})
        assert ("Loading: 100%" in screen.getvalue()) == (rank == 0)

    def refuse(done: int, total: int) -> None:
        raise LookupError("the caller's own")

    model = empty()
    with pytest.raises(LookupError if rank == 1 else CheckpointError, match="the caller's own"):
        load_together(model, folder, progress_callback=refuse if rank == 1 else None)
    assert all(parameter.is_meta for parameter in model.parameters())


def huge_pages_are_asked_for(folder: str) -> None:
    """In every process, for all of what it holds."""
    asked = 0
    real = exchange.ask_for_huge_pages

    def ask(destinations: Iterable[torch.Tensor]) -> None:
        nonlocal asked
        held = list(destinations)
        asked += sum(each.nbytes for each in held)
        real(held)

    model = empty()
    exchange.ask_for_huge_pages = ask
    try:
        load_together(model, folder)
    finally:
        exchange.ask_for_huge_pages = real
    assert_values(model)
    assert asked >= sum(parameter.nbytes for parameter in model.parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_file({name: value for name, value in filled().state_dict().items() if name != "head.weight"}, folder / "model.safetensors")
    return folder


WORKS = [
    shared_reads,
    equal_shares,
    rank0_reads,
    fully_sharded,
    tensor_parallel,
    failing,
    failing_rules,
    without_memory,
    huge_pages_are_asked_for,
]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_processes(work: Callable[[str], None], count: int, saved: Path, processes: Callable[[int], Processes]) -> None:
    processes(count).run(work, str(saved), timeout=300)
