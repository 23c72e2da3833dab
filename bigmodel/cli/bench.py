"""`bigmodel bench`: what this machine's disk, memory, links and devices do per second, kept for plans to come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..devices import DeviceKey
from ..machine import DeviceRates, Machine, Rate
from ..measuring import keep_machine, measure_machine
from .output import console, print_json

__all__ = ["bench"]


def bench(
    folder: Annotated[
        Path | None, typer.Option(help="A folder on the disk that models are read from; a scratch file is written there and deleted.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the figures, so that plans predict their times.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures this machine, in about ten seconds in which it should have nothing else to do."""
    machine = measure_machine(folder)
    if as_json:
        print_json(json.loads(machine.to_json()))
    else:
        console.print(_links(machine))
        for key, rates in machine.devices.items():
            console.print(_arithmetic(key, rates))
    if keep:
        file = keep_machine(machine)
        if not as_json:
            console.print(f"Kept in {file}. Plans of this machine's devices now say how long a step is expected to take.", soft_wrap=True)


def _links(machine: Machine) -> Table:
    table = Table("from", "to", "GB/s", "latency", title="bigmodel bench", title_justify="left")
    table.columns[2].justify = table.columns[3].justify = "right"

    def row(source: str, target: str, rate: Rate | None) -> None:
        if rate is not None:
            latency = f"{1e6 * rate.latency_seconds:.1f} µs" if rate.latency_seconds else ""
            guessed = "" if rate.source == "measured" else f" ({rate.source})"
            table.add_row(source, target, f"{rate.per_second / 1e9:.3g}{guessed}", latency)

    row("disk", "RAM", machine.disk)
    row("page cache", "RAM", machine.page_cache)
    row("RAM", "RAM", machine.ram)
    for key, rates in machine.devices.items():
        row("page-locked RAM", _name(key), rates.from_host)
        row("other RAM", _name(key), rates.from_pageable)
        row(_name(key), "page-locked RAM", rates.to_host)
    if sum(key != "cpu" for key in machine.devices) > 1:
        row("one accelerator", "another", machine.between_devices)
    return table


def _arithmetic(key: DeviceKey, rates: DeviceRates) -> Table:
    rows = sorted({sample.rows for sample in rates.matmul})
    title = f"{_name(key)}: {rates.name}, reads its memory at {rates.memory.per_second / 1e9:.3g} GB/s; 10⁹ operations per second"
    table = Table("tokens at once", *map(str, rows), title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for dtype in dict.fromkeys(sample.dtype for sample in rates.matmul):
        flops = {sample.rows: f"{sample.flops / 1e9:.3g}" for sample in rates.matmul if sample.dtype == dtype}
        table.add_row(dtype, *(flops.get(number, "-") for number in rows))
    return table


def _name(key: DeviceKey) -> str:
    return f"device {key}" if isinstance(key, int) else key
