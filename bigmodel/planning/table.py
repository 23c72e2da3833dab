"""A plan as a table for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ..text import bytes_text, names_text

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["device_text", "render"]

WIDTH = 100
BAR_WIDTH = 24


def render(plan: Plan) -> str:
    """The plan as text, 100 columns wide."""
    table = Table(
        title=f"{plan.model}: {bytes_text(plan.total_bytes)}, runs on {device_text(plan.main_device)}",
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("device", no_wrap=True)
    for heading in ("offers", "stays", "offloaded", "reserve", "left"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("used", width=BAR_WIDTH, no_wrap=True)
    contents = Table.grid(padding=(0, 2, 0, 0))
    contents.add_column(no_wrap=True)
    contents.add_column()
    for use in plan.devices:
        table.add_row(
            device_text(use.device),
            bytes_text(use.budget_bytes),
            _figure(use.resident_bytes + use.staying_bytes),
            _figure(use.offloaded_bytes),
            _figure(use.reserve_bytes),
            "" if use.left_bytes is None else bytes_text(use.left_bytes),
            _bar(use.used_bytes, use.budget_bytes),
        )
        if use.contents:
            contents.add_row(f" {device_text(use.device)}", names_text(use.contents))
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False).print(table, contents, sep="\n")
    lines = [line.rstrip() for line in text.getvalue().rstrip().splitlines()]
    return "\n".join([*lines, "", *_reasons(plan)])


def _reasons(plan: Plan) -> list[str]:
    if not plan.binding:
        reasons = [f"Everything stays on {_all_compute(plan)}: nothing has to move."]
    else:
        ring = {2: "while one group computes the next one is copied", 1: "one group at a time"}.get(plan.ring_slots)
        moved = f"{bytes_text(plan.moved_bytes)} move to {device_text(plan.main_device)} in every step"
        reasons = [
            f"{moved}{f', {ring}' if ring else ''}.",
            f"What binds: the {plan.binding}. With {bytes_text(plan.short_bytes)} more there, everything would stay.",
        ]
    return [*reasons, *plan.notes]


def _all_compute(plan: Plan) -> str:
    return ", ".join(device_text(use.device) for use in plan.devices if use.resident_bytes)


def device_text(device: int | str) -> str:
    """`"device 0"`, `"cpu"`, `"disk"`."""
    return f"device {device}" if isinstance(device, int) else device


def _figure(nbytes: int) -> str:
    return bytes_text(nbytes) if nbytes else "-"


def _bar(used_bytes: int, budget_bytes: int | None) -> str:
    if not budget_bytes:
        return ""
    filled = round(BAR_WIDTH * min(1.0, used_bytes / budget_bytes))
    return "█" * filled + "░" * (BAR_WIDTH - filled)
