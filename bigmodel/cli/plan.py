"""`bigmodel plan MODEL --gpu 24GiB --cpu 64GiB`: where everything would go, and what would help."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from .. import plans
from .budgets import MaxMemory, joined_budgets

__all__ = ["plan"]


class Logits(Enum):
    """Which logits a forward computes."""

    ALL = "all"
    LAST = "last"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint (file or folder), a config.json, a repository on the hub (owner/name), or a dump of headers (.json)."
        ),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", help="An accelerator: memory (24GiB; a bare number is bytes) or name (RTX 4090). Once for each."),
    ] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", help="RAM to plan with (64GiB).")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="Disk space to plan with; without it there is no limit.")] = None,
    max_memory: MaxMemory = None,
    dtype: Annotated[
        str | None, typer.Option(help="Load floating weights as bfloat16, float16, …, or packed: nf4, nf4-dq, fp4, int8, fp8, …")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence: keeps room for KV cache, activations and logits.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences that run together.", min=1)] = 1,
    logits: Annotated[
        Logits, typer.Option(help="Of which tokens logits are kept room for: all, as a plain call computes, or last, enough for generate.")
    ] = Logits.ALL,
    objective: Annotated[
        str | None, typer.Option(help="latency or throughput, for hardware that is named or measured; fewest bytes moved without it.")
    ] = None,
    execution: Annotated[
        str, typer.Option(help="main, or auto: modules that rest in RAM run there where a step is expected to take less.")
    ] = "main",
    strategy: Annotated[str, typer.Option(help="auto, balanced, balanced_low_0 or sequential.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plans where every weight of a model goes, from its configuration or its checkpoint's headers; no weights are read.

    Devices need not exist on this machine; without budgets this machine is measured.
    """
    found = plans.plan(
        model,
        joined_budgets(max_memory, gpu or [], cpu, disk),
        dtype=dtype,
        context=context,
        batch=batch,
        logits=logits.value,
        mode=strategy,
        objective=objective,
        execution=execution,  # type: ignore[arg-type]
    )
    print(found.to_json() if as_json else found)
