"""Planning beside accelerate: how long sizes, a map and an empty model take, and how good the maps are.

Run: `make bench`, or this file alone with the interpreter of `.venv-bench`.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable

from planning_grid import Judged, cases, judge
from side_by_side import run_worker_if_asked, worker
from torch import nn

MODULES = 63_000
REPEATS = 3


class Layer(nn.Module):
    """Eight modules: attention and feed-forward part of a transformer, and the two norms."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)


class Decoder(nn.Module):
    """A transformer of about `MODULES` modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32_000, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(MODULES // 8))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 32_000, bias=False)


def deep() -> nn.Module:
    """`MODULES` linears in Sequentials of three levels: no blocks."""
    side = round(MODULES ** (1 / 3))
    return nn.Sequential(
        *(nn.Sequential(*(nn.Sequential(*(nn.Linear(64, 64) for _ in range(side))) for _ in range(side))) for _ in range(side))
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "transformer": (Decoder, ["Layer"]),
    "transformer, blocks not named": (Decoder, None),
    "deep, without blocks": (deep, None),
}


def time_of(work: Callable[[], object]) -> float:
    """Median seconds of several runs."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def speed(library: object, modeling: object, kind: str) -> dict[str, float]:
    make, classes = KINDS[kind]

    def build() -> nn.Module:
        with library.init_empty_weights():
            return make()

    building = time_of(build)
    model = build()
    total = sum(parameter.nbytes for parameter in model.parameters())
    plain = time_of(lambda: None)
    sizes = time_of(lambda: modeling.compute_module_sizes(model))
    results = {"init_empty_weights seconds": building - plain, "sizes seconds": sizes}
    for text, shares in (("fits on two", (0.6, 0.6)), ("half is offloaded", (0.25, 0.25))):
        budgets = {**{index: int(share * total) for index, share in enumerate(shares)}, "cpu": total}
        results[f"map seconds, {text}"] = time_of(lambda b=budgets: modeling.infer_auto_device_map(model, dict(b), classes))
    results["sizes and map seconds"] = sizes + results["map seconds, half is offloaded"]
    return results


def quality(judged: list[Judged], bounds: list[int]) -> dict[str, float]:
    bound = sum(bounds)
    return {
        "cases": len(judged),
        "offloaded over lower bound": sum(each.offloaded_bytes for each in judged) / bound,
        "excess over lower bound": sum(each.offloaded_bytes for each in judged) / bound - 1,
        "moved per step over lower bound": sum(each.moved_bytes for each in judged) / bound,
        "infeasible maps": sum(not each.feasible for each in judged),
    }


def grid(solve: Callable[..., object]) -> dict[str, float]:
    from bigmodel.modules import reads_rows_only

    judged, bounds = [], []
    for case in cases():
        device_map, by_rows = solve(case)
        judged.append(judge(case, device_map, reads_rows_only if by_rows else lambda module: False))
        bounds.append(case.lower_bound)
    return quality(judged, bounds) | {f"case {index}": [*each] for index, each in enumerate(judged)}


def quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


@worker
def bigmodel_speed(kind: str) -> dict[str, float]:
    import bigmodel
    from bigmodel import utils

    quiet()
    return speed(bigmodel, utils, kind)


@worker
def accelerate_speed(kind: str) -> dict[str, float]:
    import accelerate
    from accelerate import utils

    quiet()
    return speed(accelerate, utils, kind)


if __name__ == "__main__":
    run_worker_if_asked()
