"""A chain of blocks on the simulated accelerator behind a link as slow as its arithmetic: do transfers and arithmetic overlap?

Run: `python benchmarks/simulated_link.py` (`dispatch.py` runs it too). accelerate needs no changes to run on the simulator.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from side_by_side import compare, print_verdicts, run_worker_if_asked, worker
from torch import nn

WIDTH = 1024
BLOCKS = 16
ROWS = 512
ROUNDS = 5
LIMIT = 1.15


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)]).eval()


@contextmanager
def simulated() -> Iterator[ModuleType]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "simulator"))
    import simdev

    simulator = simdev.register()
    simulator.set_up(1, "1GiB", queued_kernels=True, poison=False, sanitize=False)
    try:
        yield simulator
    finally:
        gc.collect()
        simulator.tear_down()


def seconds_of(run: Callable[[], object], simulator: ModuleType) -> float:
    simulator.synchronize(0)
    started = time.perf_counter()
    run()
    simulator.synchronize(0)
    return time.perf_counter() - started


def bare_transfers(model: nn.Module) -> Callable[[], None]:
    """The same bytes, block by block, from page-locked memory into device memory that is there already."""
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in model]
    pinned = torch.empty(max(sizes), dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(max(sizes), dtype=torch.uint8, device="sim:0")

    def run() -> None:
        for nbytes in sizes:
            on_device[:nbytes].copy_(pinned[:nbytes], non_blocking=True)

    return run


def beside_the_parts(offload: Callable[[nn.Module], nn.Module]) -> dict[str, float]:
    """Forwards of the offloaded model, interleaved with its arithmetic alone and its transfers alone, at a rate that makes these equal."""
    torch.set_num_threads(1)  # one core computes; the other one plays the link
    with simulated() as simulator, torch.no_grad():
        plain = blocks()
        x = torch.randn(ROWS, WIDTH)
        expected = plain(x)
        x = x.to("sim:0")
        resident = copy.deepcopy(plain).to("sim:0")
        resident(x)
        arithmetic = statistics.median(seconds_of(lambda: resident(x), simulator) for _ in range(ROUNDS))
        nbytes = sum(parameter.nbytes for parameter in plain.parameters())
        transfers = bare_transfers(plain)
        offloaded = offload(copy.deepcopy(plain))
        with simulator.configured(h2d_gbps=nbytes / arithmetic / 1e9):
            equal = all(torch.equal(offloaded(x).cpu(), expected) for _ in range(2))
            rounds = [[seconds_of(run, simulator) for run in (lambda: resident(x), transfers, lambda: offloaded(x))] for _ in range(ROUNDS)]
            equal = equal and torch.equal(offloaded(x).cpu(), expected)
        alone, moved, together = (statistics.median(each) for each in zip(*rounds, strict=True))
        return {
            "arithmetic alone, seconds": alone,
            "transfers alone, seconds": moved,
            "forward, seconds": together,
            "forward / the longer of the two": statistics.median(own / max(one, other) for one, other, own in rounds),
            "equals the plain model bit for bit": equal,
        }


@worker
def bigmodel_two_groups() -> dict[str, float]:
    import bigmodel

    return beside_the_parts(lambda model: bigmodel.cpu_offload(model, "sim:0"))


@worker
def bigmodel_one_group() -> dict[str, float]:
    from bigmodel.dispatch import dispatch

    def offload(model: nn.Module) -> nn.Module:
        group_bytes = sum(parameter.nbytes for parameter in model[0].parameters())
        return dispatch(model, {"": "cpu"}, main_device=torch.device("sim:0"), ring_bytes=group_bytes, no_split_module_classes="Block")

    return beside_the_parts(offload)


@worker
def accelerate_offload() -> dict[str, float]:
    import accelerate

    return beside_the_parts(lambda model: accelerate.cpu_offload(model, "sim:0"))


def main() -> None:
    title = f"{BLOCKS} blocks offloaded behind a link as slow as their arithmetic (simulated accelerator)"
    found = compare(__file__, title, ["bigmodel_two_groups", "accelerate_offload", "bigmodel_one_group"], {})
    ours, small = found["bigmodel_two_groups"], found["bigmodel_one_group"]
    print_verdicts(
        [
            ("forward / the longer of arithmetic and transfers", ours["forward / the longer of the two"], "≤", LIMIT),
            ("right", ours["equals the plain model bit for bit"], "≥", 1),
            ("right with a ring that is one group smaller", small["equals the plain model bit for bit"], "≥", 1),
        ]
    )


if __name__ == "__main__":
    run_worker_if_asked()
    main()
