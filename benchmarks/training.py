"""A prepared training loop over the bare torch loop, collectives on nested structures, and prepared loaders, beside accelerate.

Run: `make bench`, or this file alone. Every process uses one thread. A worker measures the bare loop and the library's in turns, epoch by
epoch, and the weights that come out of both are compared. Alone, a process of one thread waits for nobody: its times are processor times,
which other work on the machine hardly changes; two processes wait for each other, so theirs are wall times. At the end stands which of the
figures asked for hold. `--json FILE` keeps all figures. Environment: `BIGMODEL_BENCH_ROUNDS` (fresh processes of each side, default 3; more
than twice as many pairs of processes, since between two pairs the same loop differs by up to 5 %, however long it runs).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import compare, print_verdicts, run_worker_if_asked, worker
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

ROUNDS = int(os.environ.get("BIGMODEL_BENCH_ROUNDS", "3"))
ACCUMULATED = 4

Numbers = dict[str, float]


# Models and data.


class Mlp(nn.Module):
    """Twenty narrow layers: next to no arithmetic, so that what surrounds it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).mean(1)


class Encoder(nn.Module):
    """The size of MiniLM: six layers of width 384."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, 384)
        layer = nn.TransformerEncoderLayer(384, 12, 1536, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.words(inputs)).mean((1, 2))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, torch.linspace(-1, 1, len(inputs))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))


def numbers_set(batches: int, world: int) -> Samples:
    return Samples(torch.randn(batches * 32 * world, 64, generator=torch.Generator().manual_seed(0)))


def words_set(batches: int, world: int) -> Samples:
    return Samples(torch.randint(30522, (batches * 2 * world, 32), generator=torch.Generator().manual_seed(0)))


def clock_of(world: int) -> Callable[[], float]:
    return time.process_time if world == 1 else time.perf_counter


# Loops: the same lines, with and without the library.

Epoch = Callable[[], None]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def bare_loop(model: nn.Module, data: Samples, batch: int, world: int, accumulated: int) -> Epoch:
    sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
    loader = DataLoader(data, batch, sampler=sampler)
    optimizer = optimizer_of(model)
    ready = DistributedDataParallel(model) if world > 1 else model

    def epoch() -> None:
        for count, (inputs, targets) in enumerate(loader, 1):
            complete = count % accumulated == 0
            with contextlib.nullcontext() if complete or world == 1 else ready.no_sync():
                loss = functional.mse_loss(ready(inputs), targets)
                (loss / accumulated if accumulated > 1 else loss).backward()
            if complete:
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def prepared_loop(library: Any, model: nn.Module, data: Samples, batch: int, accumulated: int) -> Epoch:
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    ready, optimizer, loader = accelerator.prepare(model, optimizer_of(model), DataLoader(data, batch))

    def epoch() -> None:
        for inputs, targets in loader:
            loss = functional.mse_loss(ready(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def accumulating_epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(ready):
                loss = functional.mse_loss(ready(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return accumulating_epoch if accumulated > 1 else epoch


def step_times(
    library: Any, make: Callable[[], nn.Module], data: Samples, batch: int, world: int, accumulated: int, epochs: int
) -> Numbers:
    """Medians over pairs of epochs, one of each loop; the first pair warms up."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    bare = bare_loop(models[0], data, batch, world, accumulated)
    ours = prepared_loop(library, models[1], data, batch, accumulated)
    steps = len(data) // (batch * world)
    clock = clock_of(world)
    pairs = []
    for number in range(epochs + 1):
        taken = {}
        for loop in (bare, ours) if number % 2 else (ours, bare):
            started = clock()
            loop()
            taken[loop] = (clock() - started) / steps * 1000
        pairs.append((taken[bare], taken[ours]))
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    pairs = pairs[1:]
    bare_ms, ours_ms = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
    return {
        "prepared, ms a step": ours_ms,
        "bare, ms a step": bare_ms,
        "prepared − bare, µs a step": statistics.median(theirs - mine for mine, theirs in pairs) * 1000,
        "prepared over bare": statistics.median(theirs / mine for mine, theirs in pairs),
    }


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Samples], int, int, int, int]] = {
    "MLP": (Mlp, numbers_set, 32, 1, 48, 16),
    f"MLP, {ACCUMULATED} accumulated": (Mlp, numbers_set, 32, ACCUMULATED, 48, 16),
    "encoder": (Encoder, words_set, 2, 1, 2, 16),
}
"""Name → model, data, batch size, batches accumulated, batches of an epoch, epochs."""


def loops(library: Any, world: int) -> Numbers:
    found: Numbers = {}
    for name, (make, data, batch, accumulated, batches, epochs) in CASES.items():
        times = step_times(library, make, data(batches, world), batch, world, accumulated, epochs)
        found.update({f"{name}: {key}": value for key, value in times.items()})
    return found


# Loaders, without a model.


def loaders(library: Any, world: int) -> Numbers:
    """Milliseconds a batch of 32 samples of each process, of an epoch that has begun anew."""
    samples = numbers_set(200, world)
    kinds: dict[str, tuple[Dataset[Any], dict[str, Any]]] = {
        "map-style loader": (samples, {"dispatch_batches": False}),
        "iterable loader": (Stream(samples), {"dispatch_batches": False}),
        "dispatching loader": (Stream(samples), {"dispatch_batches": True}),
    }
    found = {}
    for name, (data, options) in kinds.items():
        configuration = importlib.import_module(f"{library.__name__}.utils").DataLoaderConfiguration(**options)
        loader = library.Accelerator(cpu=True, dataloader_config=configuration).prepare(DataLoader(data, 32))
        clock, times = clock_of(world), []
        for _ in range(6):
            started = clock()
            count = sum(1 for _ in loader)
            times.append((clock() - started) / count * 1000)
        if count != 200:
            raise RuntimeError(f"{name}: {count} batches")
        found[f"{name}, ms a batch"] = statistics.median(times[1:])
    return found


# Collectives.


def structures(rank: int) -> dict[str, Any]:
    small = {"losses": [torch.full((8,), float(rank)) for _ in range(10)], "more": ({"labels": torch.arange(8)}, torch.ones(8, 8))}
    large = {"logits": torch.full((64, 8192), float(rank)), "hidden": [torch.ones(256, 1024) for _ in range(3)]}
    return {"small": small, "large": large}


def collectives(library: Any) -> Numbers:
    """Milliseconds a call."""
    operations = importlib.import_module(f"{library.__name__}.utils")
    rank = dist.get_rank()
    found = {}
    for size, structure in structures(rank).items():
        uneven = {"rows": [torch.ones(4, each) for each in ([8 + rank] * 10 if size == "small" else [65536 + rank] * 3)]}
        calls: dict[str, Callable[[], Any]] = {
            "gather": lambda structure=structure: operations.gather(structure),
            "reduce": lambda structure=structure: operations.reduce(structure, "sum"),
            "broadcast": lambda structure=structure: operations.broadcast(structure),
            "pad_across_processes": lambda uneven=uneven: operations.pad_across_processes(uneven, dim=1),
        }
        for name, call in calls.items():
            times = []
            for _ in range(40 if size == "small" else 12):
                dist.barrier()
                started = time.perf_counter()
                call()
                times.append(time.perf_counter() - started)
            found[f"{name}, {size} tensors, ms a call"] = statistics.median(times[2:]) * 1000
    return found


# One process, and two.


def alone(library: Any) -> Numbers:
    torch.set_num_threads(1)
    return {**loops(library, 1), **loaders(library, 1)}


def one_of_two(rank: int, name: str, port: int, result: str) -> None:
    torch.set_num_threads(1)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in own.items()})
    library = importlib.import_module(name)
    library.Accelerator(cpu=True)
    found = {**loops(library, 2), **loaders(library, 2), **collectives(library)}
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def in_two(name: str) -> Numbers:
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        result = Path(folder) / "result.json"
        torch.multiprocessing.spawn(one_of_two, (name, port, str(result)), nprocs=2)
        return json.loads(result.read_text())


@worker
def bigmodel_alone() -> Numbers:
    return alone(importlib.import_module("bigmodel"))


@worker
def accelerate_alone() -> Numbers:
    return alone(importlib.import_module("accelerate"))


@worker
def bigmodel_in_two() -> Numbers:
    return in_two("bigmodel")


@worker
def accelerate_in_two() -> Numbers:
    return in_two("accelerate")


def main() -> None:
    run_worker_if_asked()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"torch {torch.__version__}, one thread a process")
    kept = {}
    verdicts: list[tuple[str, float, str, float]] = []
    for title, kind in (("one process", "alone"), ("two processes, gloo", "in_two")):
        names = [f"bigmodel_{kind}", f"accelerate_{kind}"]
        found = compare(__file__, title, names, {}, ROUNDS if kind == "alone" else 2 * ROUNDS + 1)
        kept[title] = found
        ours, theirs = (found[name] for name in names)
        for key, value in ours.items():
            # Two decimals, as they are shown: what lies below is the machine's noise.
            if key.endswith("over bare"):
                verdicts.append((f"{key}, {title}", round(value, 2), "≤", 1.02))
                verdicts.append((f"{key}, over accelerate's, {title}", round(value / theirs[key], 2), "≤", 1.0))
            elif key.endswith(("ms a batch", "ms a call")):
                verdicts.append((f"{key}, over accelerate's, {title}", round(value / theirs[key], 2), "≤", 1.0))
    print_verdicts(verdicts)
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
