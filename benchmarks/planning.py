"""Planning beside accelerate: how long sizes, a map and an empty model take, and how good the maps are.

Run: `make bench`, or this file alone with the interpreter of `.venv-bench`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping

import torch
from planning_grid import Case, Judged, cases, judge
from side_by_side import compare, fresh_process, run_worker_if_asked, worker
from torch import nn

from bigmodel.modules import row_tables
from bigmodel.protocols import TensorSpec

MODULES = 63_000


class Layer(nn.Module):
    """Eight modules: attention, feed-forward part and norm of a transformer."""

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
    """Processor seconds of one run, which other programs do not take from: `compare` takes the median of several processes."""
    started = time.process_time()
    work()
    return time.process_time() - started


def speed(library: object, modeling: object, kind: str) -> dict[str, float]:
    make, classes = KINDS[kind]

    started = time.process_time()
    with library.init_empty_weights():
        model = make()
    building = time.process_time() - started
    total = sum(parameter.nbytes for parameter in model.parameters())
    sizes = time_of(lambda: modeling.compute_module_sizes(model))
    budgets = {0: total // 4, 1: total // 4, "cpu": total}
    mapping = time_of(lambda: modeling.infer_auto_device_map(model, dict(budgets), classes))
    return {
        "init_empty_weights, seconds": building,
        "sizes, seconds": sizes,
        "map, half of it offloaded, seconds": mapping,
        "sizes and map, seconds": sizes + mapping,
    }


def experts(layers: int = 60, count: int = 384) -> dict[str, TensorSpec]:
    """Names and shapes of a mixture of experts of a trillion parameters."""
    wide, narrow = (2048, 7168), (7168, 2048)
    shapes = {"model.embed_tokens": (160_000, 7168), "lm_head": (160_000, 7168), "model.norm": (7168,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj": (7168, 7168) for part in "qkvo"} | {f"{name}.mlp.gate": (count, 7168)}
        for expert in range(count):
            parts = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
            shapes |= {f"{name}.mlp.experts.{expert}.{part}": shape for part, shape in parts.items()}
    return {f"{name}.weight": TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}


@worker
def bigmodel_trillion() -> dict[str, float]:
    import bigmodel

    dump = {name: {"dtype": "bfloat16", "shape": list(spec.shape)} for name, spec in experts().items()}
    budgets: dict[int | str, int | str] = {**dict.fromkeys(range(8), "80GiB"), "cpu": "1000GiB"}
    bigmodel.plan({"weight": {"dtype": "bfloat16", "shape": [4, 4]}}, budgets)  # imports what a first call imports
    return {
        "tensors": len(dump),
        "plan of a header dump, seconds": time_of(lambda: bigmodel.plan(dump, budgets, advice=False)),
        "the same with advice, seconds": time_of(lambda: bigmodel.plan(dump, budgets)),
    }


def maps_of(solve: Callable[[Case], tuple[Mapping[str, int | str], int | str | None, bool]]) -> list[Judged]:
    """Every case of the grid judged; `solve` gives a map, its main device, and whether embeddings are read by rows where they rest."""
    judged = []
    for case in cases():
        device_map, main, by_rows = solve(case)
        tables = row_tables(case.model) if by_rows else set()
        judged.append(
            judge(case, device_map, main, lambda module, tables=tables: bool({id(p) for p in module._parameters.values()} & tables))
        )
    return judged


def rows(judged: list[Judged]) -> dict[str, float]:
    return {f"{field} {index}": float(value) for index, each in enumerate(judged) for field, value in each._asdict().items()}


@worker
def bigmodel_infer() -> dict[str, float]:
    from bigmodel.utils import infer_auto_device_map

    quiet()
    return rows(
        maps_of(lambda case: (infer_auto_device_map(case.model, dict(case.budgets), case.block_classes, offload_buffers=True), None, False))
    )


@worker
def bigmodel_plan() -> dict[str, float]:
    from bigmodel.planning import plan

    def solve(case: Case) -> tuple[Mapping[str, int | str], int | str, bool]:
        made = plan(case.model, case.budgets, no_split_module_classes=case.block_classes, offload_buffers=True, advice=False)
        return made.device_map, made.main_device, True

    return rows(maps_of(solve))


@worker
def accelerate_infer() -> dict[str, float]:
    from accelerate.utils import infer_auto_device_map

    quiet()
    return rows(
        maps_of(lambda case: (infer_auto_device_map(case.model, dict(case.budgets), case.block_classes, offload_buffers=True), None, False))
    )


SIDES = ("bigmodel_infer", "bigmodel_plan", "accelerate_infer")


def print_quality() -> None:
    """What the maps of each side are worth: over all cases, and over those in which every unit fits on every card."""
    grid = list(cases())
    sides = {}
    for name in SIDES:
        found = fresh_process(__file__, name, {})
        sides[name] = [Judged(*(found[f"{field} {index}"] for field in Judged._fields)) for index in range(len(grid))]
    print_sums(f"{len(grid)} small models and budgets", grid, sides)
    fitting = [index for index, case in enumerate(grid) if case.every_unit_fits]
    print_sums(
        f"The {len(fitting)} of them in which no block, embedding or head is larger than a card",
        [grid[index] for index in fitting],
        {name: [side[index] for index in fitting] for name, side in sides.items()},
    )


def print_sums(title: str, grid: list[Case], sides: dict[str, list[Judged]]) -> None:
    """One table; "excess" is what is offloaded beyond the lower bound (weights − all cards)."""
    bound = sum(case.lower_bound for case in grid)
    theirs = sides["accelerate_infer"]

    def excess(side: list[Judged]) -> float:
        return sum(each.offloaded_bytes for each in side) - bound

    print(f"\n### {title}\n\n| | {' | '.join(sides)} |\n|---|{'---:|' * len(sides)}")
    for row, figure in {
        "offloaded, over the lower bound": lambda side: f"{sum(each.offloaded_bytes for each in side) / bound:.3f}",
        "excess over accelerate's": lambda side: f"{excess(side) / excess(theirs):.3f}",
        "moved per step, over the lower bound": lambda side: f"{sum(each.moved_bytes for each in side) / bound:.3f}",
        "maps that cannot run": lambda side: sum(not each.feasible for each in side),
        "maps without an accelerator": lambda side: sum(not each.uses_cards for each in side),
        "offloads more than a map of accelerate's that can run": lambda side: sum(
            other.feasible and each.offloaded_bytes > other.offloaded_bytes for each, other in zip(side, theirs, strict=True)
        ),
    }.items():
        print(f"| {row} | {' | '.join(str(figure(side)) for side in sides.values())} |")


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


def main() -> None:
    run_worker_if_asked()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; seconds are processor seconds", flush=True)
    print_quality()
    compare(__file__, "a trillion parameters", ["bigmodel_trillion"], {})
    for kind in KINDS:
        compare(__file__, f"{MODULES:,} modules: {kind}", ["bigmodel_speed", "accelerate_speed"], {"kind": kind})


if __name__ == "__main__":
    main()
