"""What a run needs beside weights: the KV cache, activations and workspace, logits; per module, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..errors import PlanError
from .sizes import DtypeLike

__all__ = ["Needs", "Workload", "needs_of"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The run that a plan is made for."""

    batch: int = 1
    """Sequences that run together."""
    context: int | None = None
    """Tokens of a sequence, prompt and answer together, that the run has room for; None: nothing is reserved for the run."""
    cache_dtype: DtypeLike | None = None
    """Dtype of the KV cache; None: that of the activations."""

    def __post_init__(self) -> None:
        for name, number in (("batch", self.batch), ("context", self.context)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise PlanError(f"{name}={number!r}: give a whole number of 1 or more.")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a run needs where its modules run."""

    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """By module name: what lives on the device where the module runs for as long as the run lasts (KV cache, logits)."""
    workspace_bytes: int = 0
    """Activations and temporary memory of the hungriest module: kept free on every device that computes."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what could not be known."""


def needs_of(model: nn.Module, workload: Workload, dtype: DtypeLike | None = None) -> Needs:
    """The needs of a run of `model` (on meta or real) loaded as `dtype`. Without `workload.context`: nothing."""
    return Needs()
