"""A plan as a picture: a stacked bar for each device, by kind, as a share of what it offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..errors import MissingPackageError
from ..text import bytes_text
from .kinds import COLOURS
from .table import device_text, title

if TYPE_CHECKING:
    from .plan import DeviceUse, Plan

__all__ = ["plot"]

BAR_WIDTH: Final = 0.62
SMALLEST_PERCENT: Final = 0.2
"""Of a bar, below which a kind cannot be seen and is left out of the legend."""


def plot(plan: Plan, ax: Any = None) -> Any:
    """Draws the plan on `ax` (matplotlib axes; new ones if None) and returns them. Raises `MissingPackageError` without matplotlib.

    Bars are in percent of what the device offers, since a card and the RAM beside it are of different sizes; the line at 100 is the
    budget. A device without a limit has no line, and its bar is what it holds.
    """
    if ax is None:
        ax = _new_axes(len(plan.devices))
    positions = range(len(plan.devices))
    bottoms = [0.0] * len(plan.devices)
    for kind, colour in COLOURS.items():
        heights = [_percent(use, use.bytes_by_kind[kind]) for use in plan.devices]
        if max(heights) >= SMALLEST_PERCENT:
            ax.bar(positions, heights, BAR_WIDTH, bottom=bottoms, color=colour, label=kind)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    half = BAR_WIDTH / 2 + 0.08
    limited = [position for position, use in zip(positions, plan.devices, strict=True) if use.budget_bytes is not None]
    ax.hlines([100.0] * len(limited), [x - half for x in limited], [x + half for x in limited], color="black", lw=1.5, label="budget")
    ax.set_xticks(list(positions), [_label(use) for use in plan.devices])
    ax.set_xlim(-0.6, len(plan.devices) - 0.4)
    ax.set_ylim(0, max(108.0, *(1.05 * bottom for bottom in bottoms)))
    ax.set_ylabel("% of what it offers")
    ax.set_title(title(plan), fontsize="medium", loc="left", wrap=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _percent(use: DeviceUse, nbytes: int) -> float:
    whole = use.used_bytes if use.budget_bytes is None else use.budget_bytes
    return 100.0 * nbytes / whole if whole else 0.0


def _label(use: DeviceUse) -> str:
    size = f"{bytes_text(use.used_bytes, short=True)} used" if use.budget_bytes is None else bytes_text(use.budget_bytes, short=True)
    return f"{device_text(use.device)}\n{size}"


def _new_axes(bars: int) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingPackageError(
            f'plan.plot needs the package matplotlib ({error}). Install it with: pip install "bigmodel[plot]"'
        ) from error
    return pyplot.subplots(figsize=(4.0 + 0.9 * bars, 3.4), layout="constrained")[1]
