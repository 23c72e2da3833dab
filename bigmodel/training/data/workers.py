"""What is drawn at random in worker processes: they tell their states along with each batch, so that others can go on from there."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from ..random import CpuStates

__all__ = ["Speaking", "Told", "WorkerDraws", "WorkerStart"]

States = Sequence[bytes | None]
"""The packed `CpuStates` of each worker; None: as torch and the loader's `worker_init_fn` have seeded it."""


Told = tuple[Any, int, bytes | None]
"""What a worker process sends: a batch, the worker's number, and its packed `CpuStates` after the batch; None: the batch drew nothing.

A plain tuple, since one with a class of its own takes a tenth longer on the way of a small batch.
"""


class Speaking:
    """In the place of a loader's `collate_fn` and `worker_init_fn`, in its worker processes.

    Args:
        collate: the loader's own.
        init: the loader's own.
        starts: what the workers begin with.
    """

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], Any] | None, starts: States):
        self._collate = collate
        self._init = init
        self._starts = starts

    def begin(self, worker: int) -> None:
        """`worker_init_fn`."""
        if self._init is not None:
            self._init(worker)
        start = self._starts[worker]
        if start is not None:
            CpuStates.unpacked(start).restore()
        self._worker = worker
        self._note(CpuStates.now())

    def collate(self, samples: Any) -> Told:
        """`collate_fn`."""
        batch = self._collate(samples)
        if self._is_quiet():
            return batch, self._worker, None
        states = CpuStates.now()
        self._note(states)
        return batch, self._worker, states.packed()

    def _note(self, states: CpuStates) -> None:
        self._torch, self._python, self._numpy = states.torch, states.python, _NumpyDraws(states.numpy)

    def _is_quiet(self) -> bool:
        return torch.equal(torch.get_rng_state(), self._torch) and random.getstate() == self._python and self._numpy.is_quiet()


class _NumpyDraws:
    """Whether numpy's default generator has drawn since it had a state.

    Asking it for its state takes longer than a small batch needs on its way. Every draw changes the words of its Mersenne twister, which
    lie in memory as numpy tells, but one: of the second normal number that it has made with the first. Where that waits, or the words lie
    otherwise than is known, the state is asked for.
    """

    def __init__(self, state: Any):
        self._state = pickle.dumps(state)
        self._words = b""
        if state["bit_generator"] == "MT19937" and not state["has_gauss"] and hasattr(numpy.random, "get_bit_generator"):
            known = state["state"]["key"].astype(numpy.uint32).tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder)
            self._address = numpy.random.get_bit_generator().ctypes.state_address
            if ctypes.string_at(self._address, len(known)) == known:
                self._words = known

    def is_quiet(self) -> bool:
        """Nothing was drawn."""
        if self._words:
            return ctypes.string_at(self._address, len(self._words)) == self._words
        return pickle.dumps(numpy.random.get_state(legacy=False)) == self._state


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """How the workers of a loader begin, so that they go on as others have stopped."""

    first: int
    """The batch that worker 0 reads first; the others take the following ones, in turn."""
    states: States

    def plain(self) -> dict[str, Any]:
        """As numbers in lists and dictionaries."""
        return {
            "first": self.first,
            "states": [None if state is None else CpuStates.unpacked(state).plain() for state in self.states],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WorkerStart:
        """What `plain` gave."""
        states = [None if state is None else CpuStates.from_plain(state).packed() for state in plain["states"]]
        return cls(plain["first"], states)


@dataclass(slots=True)
class WorkerDraws:
    """What the workers of a loader have told in an epoch.

    torch deals batches out in turn. Another loader's workers take the same parts if they begin with a batch of worker 0, so where to go on
    from is the last such one: up to a batch for each worker is read once more, with the same values.
    """

    start: WorkerStart
    """Of the epoch, or of its rest."""
    is_stream: bool
    """Where it stands is only found by reading the whole epoch again."""
    persist: bool
    """The same workers read the next epoch."""
    at_a_step: int
    """Batches that a step of the loop takes."""
    _states: list[bytes | None] = field(init=False)
    """After all batches before the first of `_recent`."""
    _recent: deque[tuple[int, int, bytes | None]] = field(init=False, default_factory=deque, repr=False)

    def __post_init__(self) -> None:
        self._states = list(self.start.states)

    def note(self, number: int, worker: int, states: bytes | None, steps: int) -> None:
        """Batch `number` of the epoch has come, while `steps` steps have been handed out."""
        self._recent.append((number, worker, states))
        first = self._first(steps)
        while self._recent and self._recent[0][0] < first:
            self._take(self._states, *self._recent.popleft()[1:])

    def at(self, steps: int) -> WorkerStart:
        """How to go on after `steps` steps."""
        if self.is_stream:
            return self.start
        first = self._first(steps)
        states = list(self._states)
        for number, worker, told in self._recent:
            if number < first:
                self._take(states, worker, told)
        return WorkerStart(first, states)

    def following(self) -> WorkerStart:
        """How the next epoch begins, with workers that persist."""
        states = list(self._states)
        for _, worker, told in self._recent:
            self._take(states, worker, told)
        return WorkerStart(0, states)

    def _first(self, steps: int) -> int:
        batches = steps * self.at_a_step
        return batches - (batches - self.start.first) % len(self._states)

    @staticmethod
    def _take(states: list[bytes | None], worker: int, told: bytes | None) -> None:
        if told is not None:
            states[worker] = told
