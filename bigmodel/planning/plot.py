"""A plan as a picture: a stacked bar for each device, by kind, with a line at its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..constants import GiB, KiB, MiB
from ..errors import MissingPackageError
from .kinds import COLOURS
from .table import device_text, title

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["plot"]

BAR_WIDTH = 0.62


def plot(plan: Plan, ax: Any = None) -> Any:
    """Draws the plan on `ax` (matplotlib axes; new ones if None) and returns them. Raises `MissingPackageError` without matplotlib."""
    if ax is None:
        ax = _new_axes(len(plan.devices))
    largest = max((max(use.used_bytes, use.budget_bytes or 0) for use in plan.devices), default=0)
    unit, unit_name = next(((size, name) for size, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if largest >= 2 * size), (1, "bytes"))
    positions = range(len(plan.devices))
    bottoms = [0.0] * len(plan.devices)
    for kind, colour in COLOURS.items():
        heights = [use.bytes_by_kind[kind] / unit for use in plan.devices]
        if any(heights):
            ax.bar(positions, heights, BAR_WIDTH, bottom=bottoms, color=colour, label=kind)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    label: str | None = "budget"
    for position, use in zip(positions, plan.devices, strict=True):
        if use.budget_bytes is not None:
            half = BAR_WIDTH / 2 + 0.08
            ax.hlines(use.budget_bytes / unit, position - half, position + half, color="black", lw=1.5, label=label)
            label = None
    ax.set_xticks(list(positions), [device_text(use.device) for use in plan.devices])
    ax.set_xlim(-0.6, len(plan.devices) - 0.4)
    ax.set_ylim(0, max(1.0, 1.08 * largest / unit))
    ax.set_ylabel(unit_name)
    ax.set_title(title(plan), fontsize="medium", loc="left", wrap=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _new_axes(bars: int) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingPackageError(
            f'plan.plot needs the package matplotlib ({error}). Install it with: pip install "bigmodel[plot]"'
        ) from error
    return pyplot.subplots(figsize=(4.0 + 0.9 * bars, 3.4), layout="constrained")[1]
