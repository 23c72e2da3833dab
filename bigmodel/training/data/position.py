"""Where a loader stands: epoch, batches handed out, and what was drawn at random to come there; kept as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..random import CpuStates
from .workers import WorkerDraws, WorkerStart

__all__ = ["LAYOUT", "Draws", "Position", "Resumption"]

LAYOUT = 1
"""Of `state_dict`; counts up when a key changes its meaning."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Random states at one moment."""

    defaults: CpuStates
    """The default generators'."""
    generators: list[torch.Tensor]
    """Those of the loader's own generators, in `own_generators` order."""

    @classmethod
    def now(cls, generators: Sequence[torch.Generator], torch_alone: bool = False) -> Draws:
        """The states at this moment; of the default generators torch's alone, where nothing else is drawn from."""
        return cls(CpuStates.now(torch_alone), [generator.get_state() for generator in generators])

    def restore(self, generators: Sequence[torch.Generator]) -> None:
        """Every generator goes on from these states."""
        self.defaults.restore()
        for generator, state in zip(generators, self.generators, strict=True):
            generator.set_state(state)

    def plain(self) -> dict[str, Any]:
        """As numbers in lists and dictionaries."""
        return {"defaults": self.defaults.plain(), "generators": [state.tolist() for state in self.generators]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Draws:
        """What `plain` gave."""
        return cls(CpuStates.from_plain(plain["defaults"]), [torch.tensor(state, dtype=torch.uint8) for state in plain["generators"]])


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where the next iteration of a loader goes on."""

    epoch: int
    batches: int
    """Handed out in this epoch already; above 0."""
    start: Draws
    """When the epoch began."""
    ahead: torch.Tensor | None
    """torch's CPU generator before the next batch was read; None where worker processes read."""
    base: Any
    """The state of torchdata's loader; None without it."""
    workers: WorkerStart | None
    """How worker processes go on; None where there are none, or torchdata's."""


@dataclass(slots=True)
class Position:
    """Where a loader stands. Loaders made by `skip_first_batches` share that of the loader that they were made of."""

    epoch: int = 0
    batches: int = 0
    """Handed out in this epoch, skipped ones included."""
    finished: bool = False
    """The last batch of the epoch has been handed out."""
    start: Draws | None = None
    """When the epoch began; None before the first."""
    ahead: torch.Tensor | None = field(default=None, repr=False)
    """torch's CPU generator before the batch was read that comes next."""
    base: Any = None
    """What torchdata's loader said before it read the batch that comes next."""
    workers_were_seeded: bool = False
    """Worker processes that persist were there when the epoch began: no seed was drawn for them."""
    workers: WorkerDraws | None = None
    """What worker processes have told of what they draw; None where there are none, or torchdata's."""
    loaded_workers: WorkerStart | None = None
    """How worker processes that persist begin the epoch that a loaded state stands before."""
    resumption: Resumption | None = None
    """Where the next iteration goes on, if it does."""

    def begin(self, epoch: int, start: Draws) -> None:
        """An epoch begins with its first batch."""
        self.epoch, self.batches, self.finished, self.start, self.ahead, self.base = epoch, 0, False, start, None, None

    def end(self) -> None:
        """The loop has ended: if it came to the end of the epoch, the next one follows."""
        if self.finished:
            self.epoch, self.batches, self.finished = self.epoch + 1, 0, False

    def following_workers(self) -> WorkerStart | None:
        """How the workers of the next epoch begin, where they are those of this one; None where torch seeds them."""
        if self.workers is None:
            return self.loaded_workers
        return self.workers.following() if self.workers.persist else None

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        going_on = self.resumption
        if going_on is None and self.batches and not self.finished:
            assert self.start is not None
            workers = None if self.workers is None else self.workers.at(self.batches)
            going_on = Resumption(self.epoch, self.batches, self.start, self.ahead, self.base, workers)
        if going_on is None:
            following = self.following_workers()
            coming = None if following is None else following.plain()
            return {"layout": LAYOUT, "epoch": self.epoch + self.finished, "batches": 0, "workers": coming}
        return {
            "layout": LAYOUT,
            "epoch": going_on.epoch,
            "batches": going_on.batches,
            "start": going_on.start.plain(),
            "ahead": None if going_on.ahead is None else going_on.ahead.tolist(),
            "base": going_on.base,
            "workers": None if going_on.workers is None else going_on.workers.plain(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where `state` was taken."""
        self.epoch, self.batches, self.finished, self.resumption = state["epoch"], 0, False, None
        plain = state.get("workers")
        workers = None if plain is None else WorkerStart.from_plain(plain)
        self.workers, self.loaded_workers = None, workers
        if state["batches"]:
            ahead = state["ahead"]
            self.resumption = Resumption(
                epoch=state["epoch"],
                batches=state["batches"],
                start=Draws.from_plain(state["start"]),
                ahead=None if ahead is None else torch.tensor(ahead, dtype=torch.uint8),
                base=state["base"],
                workers=workers,
            )
