"""What would help a plan: the same request with one thing changed, each with its effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..protocols import WeightFormat

if TYPE_CHECKING:
    from .plan import Plan
    from .request import Request

__all__ = ["Advice", "advise"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One change of the request, and what the plan would become."""

    change: str
    """What to do, for people: `"4-bit weights (nf4)"`, `"one more card of 24.0 GiB"`."""
    moved_bytes: int
    """Bytes that would travel in every step."""
    disk_bytes: int
    """Bytes that would rest on disk."""
    fits: bool
    """Whether everything would stay on the devices that compute."""
    decode_seconds: float | None = None
    """Seconds per step that would be expected, where the plan has a prediction."""


def advise(request: Request, found: Plan, solve: Callable[[Request], Plan], formats: Sequence[WeightFormat]) -> tuple[Advice, ...]:
    """The changes that would let fewer bytes travel than `found` does, the best first; none if nothing travels."""
    return ()
