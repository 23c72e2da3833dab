"""What a plan is to be best at, beyond moving as few bytes as it can: the time of a step, or the tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..devices import DeviceKey
from ..errors import PlanError
from ..machine import Machine
from .table import device_text, seconds_text

if TYPE_CHECKING:
    from .plan import Plan
    from .request import Request

__all__ = ["choose"]

MOST_SEQUENCES: Final = 4096
WORTHWHILE: Final = 0.99
"""A change has to take at most this part of the time; what is left is within the error of any prediction."""

Solve = Callable[["Request"], "Plan"]


def choose(request: Request, solve: Solve) -> tuple[Request, Plan]:
    """The plan that serves the request's objective best, and the request that it answers.

    Without an objective: the plan that moves the fewest bytes. "latency": of that one and of those with fewer devices, the one whose step
    is expected to take least; "throughput": the batch whose tokens per second are expected to be the most, as far as memory goes.
    """
    found = solve(request)
    if request.objective is None:
        return request, found
    assert request.machine is not None  # a request with an objective has one
    if request.objective == "latency":
        return _fastest(request, found, solve, request.machine)
    return _most_tokens(request, found, solve)


def _fastest(request: Request, found: Plan, solve: Solve, machine: Machine) -> tuple[Request, Plan]:
    best, best_request = found, request
    for fewer in _fewer_devices(request, machine):
        plan = _attempt(fewer, solve)
        if plan is not None and _step_seconds(plan) <= WORTHWHILE * _step_seconds(best):
            best, best_request = plan, fewer
    if best is found:
        return request, found
    left_out = ", ".join(device_text(key) for key in request.budgets if key not in best_request.budgets)
    times = f"{seconds_text(_step_seconds(best))} a step rather than {seconds_text(_step_seconds(found))}"
    return best_request, replace(best, notes=(*best.notes, f"Left out because it is faster without: {left_out} ({times})."))


def _step_seconds(plan: Plan) -> float:
    return float("inf") if plan.prediction is None else plan.prediction.decode_seconds


def _attempt(request: Request, solve: Solve) -> Plan | None:
    try:
        return solve(request)
    except PlanError:
        return None


def _fewer_devices(request: Request, machine: Machine) -> Iterator[Request]:
    """The request with only its fastest accelerator, its two fastest, and so on; and with the CPU alone."""

    def speed(key: DeviceKey) -> float:
        return machine.devices[key].memory.per_second

    usable = [key for key, budget in request.budgets.items() if key not in ("cpu", "disk") and budget > 0]
    ranked = sorted(usable, key=speed, reverse=True)
    for count in range(1, len(ranked)):
        yield _with_accelerators(request, ranked[:count])
    if ranked and request.budgets.get("cpu", 0) > 0:
        yield _with_accelerators(request, [])


def _with_accelerators(request: Request, kept: list[DeviceKey]) -> Request:
    budgets = {key: budget for key, budget in request.budgets.items() if key in kept or key in ("cpu", "disk")}
    return replace(request, budgets=budgets)


def _most_tokens(request: Request, found: Plan, solve: Solve) -> tuple[Request, Plan]:
    if request.workload.context is None:
        note = "The batch was not raised: give context=… (tokens of a sequence), so that its memory is known."
        return request, replace(found, notes=(*found.notes, note))
    if not any(use.state_bytes or use.workspace_bytes for use in found.devices):
        note = "The batch was not raised: what a sequence of this model needs is not known."
        return request, replace(found, notes=(*found.notes, note))
    tried: dict[int, Plan | None] = {request.workload.batch: found}

    def tokens(batch: int) -> float:
        if batch not in tried:
            tried[batch] = _attempt(_with_batch(request, batch), solve)
        plan = tried[batch]
        if plan is None or plan.prediction is None or plan.main_device != found.main_device:
            return 0.0  # no batch is worth an accelerator
        return plan.prediction.tokens_per_second

    best = request.workload.batch
    while 2 * best <= MOST_SEQUENCES and tokens(2 * best) > tokens(best) / WORTHWHILE:
        best *= 2
    step = best // 2
    while step:
        # Memory does not end at a power of two.
        best = max((batch for batch in (best - step, best, best + step) if batch >= request.workload.batch), key=tokens)
        step //= 2
    plan = tried[best]
    assert plan is not None
    if best == request.workload.batch:
        return request, plan
    assert plan.prediction is not None
    assert found.prediction is not None
    note = (
        f"Batch {best} rather than {request.workload.batch}: {plan.prediction.tokens_per_second:.3g} tokens per second are expected, "
        f"{found.prediction.tokens_per_second:.3g} without it."
    )
    return _with_batch(request, best), replace(plan, notes=(*plan.notes, note))


def _with_batch(request: Request, batch: int) -> Request:
    return replace(request, workload=replace(request.workload, batch=batch))
