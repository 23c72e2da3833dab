"""A plan as HTML for notebooks: one self-contained piece, without scripts, every text escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..text import bytes_text, names_text
from .kinds import COLOURS
from .table import advice_rows, columns, device_text, reasons, title

if TYPE_CHECKING:
    from .plan import DeviceUse, Plan

__all__ = ["html"]

BAR_PIXELS = 240
_RIGHT = ' style="text-align:right"'
_LEFT = ' style="text-align:left"'


def html(plan: Plan) -> str:
    """The table of `table.render`, with a bar of kinds for each device."""
    shown = columns(plan)
    head = "".join(f"<th{_RIGHT}>{escape(column.heading)}</th>" for column in shown)
    body = "".join(_row(use, [column.figure(use) for column in shown]) for use in plan.devices)
    used = [kind for kind in COLOURS if any(use.bytes_by_kind[kind] for use in plan.devices)]
    legend = " ".join(f"{_block(COLOURS[kind], 10)} {escape(kind)}" for kind in used)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in reasons(plan))
    advice = "".join(f"<li>{escape(change)}: {escape(effect)}</li>" for change, effect in advice_rows(plan))
    return (
        f"<div><p><b>{escape(title(plan))}</b></p>"
        f"<table><thead><tr><th{_LEFT}>device</th>{head}<th{_LEFT}>used</th><th{_LEFT}>holds</th></tr></thead><tbody>{body}</tbody></table>"
        f"<p>{legend}</p>{sentences}{f'<p>What would help:</p><ul>{advice}</ul>' if advice else ''}</div>"
    )


def _row(use: DeviceUse, figures: list[str]) -> str:
    cells = "".join(f"<td{_RIGHT}>{escape(figure)}</td>" for figure in figures)
    holds = escape(names_text(use.contents))
    return f"<tr><td{_LEFT}>{escape(device_text(use.device))}</td>{cells}<td{_LEFT}>{_bar(use)}</td><td{_LEFT}>{holds}</td></tr>"


def _bar(use: DeviceUse) -> str:
    """Its bytes by kind, as wide as the budget; without a budget there is nothing to compare them with."""
    if not use.budget_bytes:
        return ""
    pieces = [
        _block(COLOURS[kind], nbytes * BAR_PIXELS // use.budget_bytes, f"{kind}: {bytes_text(nbytes)}")
        for kind, nbytes in use.bytes_by_kind.items()
        if nbytes
    ]
    return f'<div style="width:{BAR_PIXELS}px;height:12px;background:#e8e8e8;line-height:0;white-space:nowrap">{"".join(pieces)}</div>'


def _block(colour: str, pixels: int, hint: str = "") -> str:
    shown = f' title="{escape(hint)}"' if hint else ""
    return f'<span{shown} style="display:inline-block;height:12px;width:{pixels}px;background:{colour}"></span>'
