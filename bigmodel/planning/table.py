"""A plan as a table for people."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ..devices import DeviceKey
from ..text import bytes_text, names_text, printable
from .kinds import COLOURS, HEADINGS, Kind

if TYPE_CHECKING:
    from .advice import Advice
    from .plan import DeviceUse, Plan

__all__ = ["Column", "advice_rows", "binding_uses", "columns", "device_text", "devices_text", "reasons", "render", "seconds_text", "title"]

WIDTH = 100
BAR_WIDTH = 24
_NOTHING_MOVES = "Nothing has to move in a step: of the embeddings that rest elsewhere, only the rows that are looked up are read."
SHOWN_SHARE = 0.01
"""Of the model, from which on buffers are told apart from weights."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of each device."""

    heading: str
    figure: Callable[[DeviceUse], str]


def title(plan: Plan) -> str:
    """One line: the model, its bytes, how it is packed, where it runs and for which run."""
    packed = f" as {plan.weight_format}" if plan.weight_format else ""
    sequences = "1 sequence" if plan.batch == 1 else f"{plan.batch} sequences"
    run = f", {sequences} of {plan.context} tokens" if plan.context is not None else ""
    return f"{plan.model}: {bytes_text(plan.total_bytes)}{packed}, runs on {device_text(plan.main_device)}{run}"


def columns(plan: Plan) -> list[Column]:
    """What is shown of each device: what it offers, holds and keeps free; kinds that no device has are left out, offloaded ones are not."""
    by_kind = [use.bytes_by_kind for use in plan.devices]
    buffers = sum(kinds["buffers"] for kinds in by_kind) >= SHOWN_SHARE * plan.total_bytes

    def column(*kinds: Kind) -> Column:
        return Column(HEADINGS.get(kinds[0], kinds[0]), lambda use: short_text(sum(use.bytes_by_kind[kind] for kind in kinds)))

    shown = [Column("offers", offered_text), column("weights") if buffers else column("weights", "buffers")]
    for kind in list(COLOURS)[1:]:
        if (kind == "buffers" and buffers) or kind in ("offloaded", "reserve") or (kind != "buffers" and any(k[kind] for k in by_kind)):
            shown.append(column(kind))
    return [*shown, Column("left", lambda use: "" if use.left_bytes is None else bytes_text(use.left_bytes, short=True))]


def offered_text(use: DeviceUse) -> str:
    """What the device offers. Where no budget was given, the disk has no limit; the CPU, which may have to compute, offers nothing."""
    return "not given" if use.budget_bytes is None and use.device != "disk" else short_text(use.budget_bytes)


def short_text(nbytes: int | None) -> str:
    """Bytes in three digits, and a dash for nothing."""
    return "-" if nbytes == 0 else bytes_text(nbytes, short=True)


def render(plan: Plan) -> str:
    """The plan as text, at most 100 columns wide."""
    shown = columns(plan)
    names = [device_text(use.device) for use in plan.devices]
    rows = [[column.figure(use) for column in shown] for use in plan.devices]
    widths = [max(len(column.heading), *(len(row[index]) for row in rows)) for index, column in enumerate(shown)]
    bar_width = min(BAR_WIDTH, WIDTH - max(map(len, names)) - sum(widths) - 2 * (len(widths) + 1))
    table = Table(
        title=title(plan), title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False
    )
    table.add_column("device", no_wrap=True)
    for column in shown:
        table.add_column(column.heading, justify="right", no_wrap=True)
    if bar_width >= len("used"):
        table.add_column("used", width=bar_width, no_wrap=True)
    contents = Table.grid(padding=(0, 2, 0, 0))
    contents.add_column(no_wrap=True)
    contents.add_column()
    for use, name, row in zip(plan.devices, names, rows, strict=True):
        table.add_row(name, *row, *([_bar(use.used_bytes, use.budget_bytes, bar_width)] if bar_width >= len("used") else []))
        if use.contents:
            contents.add_row(name, names_text(use.contents))
    lines = [*_printed(table), "", *_printed(contents), ""]
    for reason in reasons(plan):
        lines += textwrap.wrap(reason, WIDTH)
    if plan.advice:
        lines += ["", "What would help:", *_printed(_advice_table(plan))]
    return printable("\n".join(lines))


def _printed(table: Table) -> list[str]:
    text = io.StringIO()
    # Without force_jupyter=False rich shows the table in a notebook by itself, wherever it was told to write.
    console = Console(
        file=text,
        width=WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
    )
    console.print(table)
    return [line.rstrip() for line in text.getvalue().rstrip().splitlines()]


def _advice_table(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in advice_rows(plan):
        table.add_row("  -", *row)
    return table


def advice_rows(plan: Plan) -> list[tuple[str, str]]:
    """Each change that would help, and its effect."""
    return [(advice.change, _effect(plan, advice)) for advice in plan.advice]


def _effect(plan: Plan, advice: Advice) -> str:
    if advice.main_device != plan.main_device:
        moved = f"{bytes_text(advice.moved_bytes)} move per step" if advice.moved_bytes else "nothing has to move"
        effect = f"runs on {device_text(advice.main_device)}, {moved}"
    elif not advice.moved_bytes:
        effect = "nothing has to move"
    elif advice.moved_bytes < plan.moved_bytes:
        effect = f"{bytes_text(advice.moved_bytes)} move per step"
    else:
        effect = f"{bytes_text(advice.disk_bytes)} on disk" if advice.disk_bytes else "nothing on disk"
    return effect if advice.token_seconds is None else f"{effect}; {seconds_text(advice.token_seconds)} per token"


def reasons(plan: Plan) -> list[str]:
    """Sentences: what moves, how long that is expected to take, what binds, by how much, and what else there is to know."""
    if not plan.binding:
        found = [f"Everything stays on {devices_text([use.device for use in plan.devices if use.resident_bytes])}: nothing has to move."]
    else:
        ring = {2: "while one group computes the next one is copied", 1: "one group at a time"}.get(plan.ring_slots)
        moved = f"{bytes_text(plan.moved_bytes)} move to {device_text(plan.main_device)} in every step{f', {ring}' if ring else ''}."
        found = [moved if plan.moved_bytes else _NOTHING_MOVES, _binding(plan)]
        if on_disk := plan.short_bytes_by_device.get("cpu", 0) if plan.main_device != "cpu" else 0:
            found.append(f"{bytes_text(on_disk)} rest on disk: cpu is that much short.")
    if plan.prediction is not None:
        expected = plan.prediction
        basis = {"measured": "measured rates", "table": "published rates", "guess": "published and guessed rates"}[expected.source]
        found.append(
            f"Expected ({basis}): {seconds_text(expected.decode_seconds)} per step ({expected.tokens_per_second:.3g} tokens per second), "
            f"{seconds_text(expected.prefill_seconds)} for a prompt of {expected.context} tokens, {seconds_text(expected.load_seconds)} to "
            f"load; decoding waits for the {expected.binds}."
        )
    return [*found, *plan.notes]


def _binding(plan: Plan) -> str:
    """What binds, what that memory goes to, and how much more would do."""
    uses = binding_uses(plan.main_device, plan.devices)
    taken = {kind: sum(use.bytes_by_kind[kind] for use in uses) for kind in COLOURS}
    spent = ", ".join(f"{bytes_text(nbytes)} {kind}" for kind, nbytes in taken.items() if nbytes)
    offered = [use.budget_bytes for use in uses if use.budget_bytes is not None]
    given = f" ({bytes_text(sum(offered)) if len(offered) == len(uses) else 'not given'}: {spent})" if spent else ""
    where = "there" if len(uses) == 1 else f"on {device_text(plan.main_device)}"
    return f"What binds: the {plan.binding}{given}. With {bytes_text(plan.short_bytes)} more {where}, everything would stay."


def binding_uses(main: DeviceKey, uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """The devices whose memory keeps weights from staying: the accelerators, or the CPU where that is the main device."""
    if main == "cpu":
        return [use for use in uses if use.device == "cpu"]
    return [use for use in uses if use.device not in ("cpu", "disk") and (use.budget_bytes or use.used_bytes)]


def devices_text(devices: Sequence[DeviceKey]) -> str:
    """`"device 0"`, `"devices 0–3"`, `"cpu"`."""
    numbered = [str(device) for device in devices if isinstance(device, int)]
    others = [str(device) for device in devices if not isinstance(device, int)]
    indices = [f"device{'s' * (len(numbered) > 1)} {names_text(numbered)}"] if numbered else []
    return ", ".join([*indices, *others])


def seconds_text(seconds: float) -> str:
    """Seconds for people: `"2.5 s"`, `"120 ms"`, `"3.2 min"`."""
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def device_text(device: int | str) -> str:
    """`"device 0"`, `"cpu"`, `"disk"`."""
    return f"device {device}" if isinstance(device, int) else device


def _bar(used_bytes: int, budget_bytes: int | None, width: int) -> str:
    if not budget_bytes:
        return ""
    filled = round(width * min(1.0, used_bytes / budget_bytes))
    return "█" * filled + "░" * (width - filled)
