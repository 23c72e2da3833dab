"""Which of the blocks and leaf modules that rest in RAM run there, because activations cross the link sooner than weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..devices import CPU_RESIDENT, DeviceKey
from .cost import Prediction, Stage
from .items import Unit
from .predicting import Case
from .solver import Assignment
from .table import seconds_text

if TYPE_CHECKING:
    from .request import Request

__all__ = ["execution_note", "run_where_it_is_faster"]

COUNTS: Final = 16
"""How many numbers of blocks are tried, evenly from one to all of them."""
WORTHWHILE: Final = 0.99
"""A change has to take at most this part of the time; what is left is within the error of any prediction."""


def run_where_it_is_faster(request: Request, case: Case, units: Sequence[Unit], assignment: Assignment, workspace_bytes: int) -> Assignment:
    """The assignment with those modules running on the CPU whose weights are expected to cost a step more on their way.

    Tried are the last ones that rest in RAM, whose activations cross the link twice in all, and as many at equal distances, so that the
    CPU computes while the weights of those between travel. Both are as good as the cost model's forward says. The CPU's budget has
    room for what they bring along (the KV cache, buffers, `workspace_bytes` for activations).
    """
    candidates = [index for index, unit in enumerate(units) if assignment.places[index] == "cpu" and _is_moving_module(unit)]
    if assignment.main == "cpu" or not candidates:
        return assignment
    left_bytes = request.budgets.get("cpu", 0) - workspace_bytes
    left_bytes -= sum(unit.stored_bytes for unit, place in zip(units, assignment.places, strict=True) if place == "cpu")
    best_seconds = case.predicted(case.stages).decode_seconds
    chosen: tuple[int, ...] = ()
    for tried in _choices(candidates):
        if sum(units[index].staying_bytes for index in tried) > left_bytes:
            continue
        stages = _with_some_on_the_cpu(case.stages, {units[index].items[0].name for index in tried})
        seconds = case.predicted(stages).decode_seconds
        if seconds <= WORTHWHILE * best_seconds:
            best_seconds, chosen = seconds, tried
    if not chosen:
        return assignment
    places: list[DeviceKey] = list(assignment.places)
    for index in chosen:
        places[index] = CPU_RESIDENT
    passes = any(units[index].moved_bytes for index, place in enumerate(places) if place in ("cpu", "disk"))
    reserve_bytes = assignment.reserve_bytes if passes else 0
    _fill_main(places, units, assignment.main, request.budgets[assignment.main] - workspace_bytes - reserve_bytes)
    return replace(
        assignment,
        places=tuple(places),
        slots=assignment.slots if passes else 0,
        reserve_bytes=reserve_bytes,
        moved_bytes=sum(unit.moved_bytes for unit, place in zip(units, places, strict=True) if place in ("cpu", "disk")),
        is_optimal=not passes,
    )


def _fill_main(places: list[DeviceKey], units: Sequence[Unit], main: DeviceKey, budget_bytes: int) -> None:
    """Puts on the main device what it has room for again: the KV cache of blocks that run elsewhere, and perhaps the ring, are gone."""
    left_bytes = budget_bytes
    for unit, place in zip(units, places, strict=True):
        left_bytes -= unit.total_bytes if place == main else unit.staying_bytes if place in ("cpu", "disk") else 0
    waiting = [index for index, place in enumerate(places) if place in ("cpu", CPU_RESIDENT)]
    for index in sorted(waiting, key=lambda index: -units[index].moved_bytes):
        needed_bytes = units[index].stored_bytes if places[index] == "cpu" else units[index].total_bytes
        if needed_bytes <= left_bytes:
            places[index] = main
            left_bytes -= needed_bytes


def _is_moving_module(unit: Unit) -> bool:
    """Whether it is a block or a leaf module by itself: what is tied to other modules would have to be in two places."""
    return len(unit.items) == 1 and unit.items[0].entries == (unit.items[0].name,) and unit.moved_bytes > 0


def _choices(candidates: Sequence[int]) -> Iterator[tuple[int, ...]]:
    count = len(candidates)
    for size in sorted({-(-count * step // COUNTS) for step in range(1, COUNTS + 1)}):
        last = tuple(candidates[count - size :])
        yield last
        spread = tuple(candidates[(2 * position + 1) * count // (2 * size)] for position in range(size))
        if spread != last:
            yield spread


def _with_some_on_the_cpu(stages: Sequence[Stage], names: set[str]) -> list[Stage]:
    return [replace(stage, runs_on="cpu", rests_on="cpu", moved_bytes=0, row_bytes=0) if stage.name in names else stage for stage in stages]


def execution_note(assignment: Assignment, before: Prediction, after: Prediction) -> str:
    """What was chosen, and what it changes."""
    count = sum(place == CPU_RESIDENT for place in assignment.places)
    which = "1 module that rests in RAM runs" if count == 1 else f"{count} modules that rest in RAM run"
    step = f"{seconds_text(after.decode_seconds)} a step rather than {seconds_text(before.decode_seconds)}"
    prompt = f"{seconds_text(after.prefill_seconds)} rather than {seconds_text(before.prefill_seconds)}"
    return (
        f"{which} there (cpu:resident), where activations travel instead of weights: {step}, a prompt of {after.context:,} tokens {prompt}."
    )
