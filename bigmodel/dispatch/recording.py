"""When weights travelled and when their blocks computed: what a dispatched model did while somebody was looking."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn

from ..devices import has_streams, synchronize
from ..errors import DispatchError

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["Activity", "Log", "Mark", "Recording", "Timeline", "record"]

Kind: TypeAlias = Literal["read", "copy", "compute"]
Mark: TypeAlias = "torch.Event | float"
"""A moment: an event on a device's stream, or seconds of the host's clock."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Something that a model did for a while."""

    kind: Kind
    """`"read"`: from where the weights rest into RAM (pages of files, or a buffer). `"copy"`: from RAM to a device. `"compute"`: from the
    moment the weights are in their modules to the end of the forward that needs them."""
    group: str
    """The block, or part of one, as `placement` names it."""
    device: str
    """Where it computes."""
    start_seconds: float
    """Since the recording began, as the device saw it."""
    end_seconds: float
    nbytes: int = 0
    """Bytes that travelled; 0 for arithmetic."""


@dataclass(slots=True)
class Timeline:
    """Filled when the recording ends."""

    activities: list[Activity] = field(default_factory=list)
    """In the order in which they began."""


class Log:
    """Collects marks, from any thread, and turns them into activities once all work is done."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[Kind, str, torch.device, Mark, Mark, int]] = []
        self._zeros: dict[torch.device, tuple[Mark, float]] = {}
        self._start = time.perf_counter()
        for device in devices:
            synchronize(device)
            self._zeros[device] = (self.mark(device), time.perf_counter())

    def mark(self, device: torch.device) -> Mark:
        """Now: on a device with streams, behind the work queued so far on the current stream."""
        if not has_streams(device):
            return time.perf_counter()
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def add(self, kind: Kind, group: str, device: torch.device, begin: Mark, end: Mark, nbytes: int = 0) -> None:
        """Something went on between two marks."""
        with self._lock:
            self._spans.append((kind, group, device, begin, end, nbytes))

    def activities(self) -> list[Activity]:
        """All that was added, in order; waits for the devices."""
        for device in self._zeros:
            synchronize(device)
        with self._lock:
            spans = list(self._spans)
        found = [
            Activity(kind, group, str(device), self._seconds(device, begin), self._seconds(device, end), nbytes)
            for kind, group, device, begin, end, nbytes in spans
        ]
        return sorted(found, key=lambda activity: activity.start_seconds)

    def _seconds(self, device: torch.device, mark: Mark) -> float:
        if not isinstance(mark, torch.Event):
            return mark - self._start
        zero, at = self._zeros[device]
        assert isinstance(zero, torch.Event)
        return at - self._start + zero.elapsed_time(mark) / 1000


@dataclass(frozen=True, slots=True)
class Recording:
    """A log, and the group that something is done for."""

    log: Log
    group: str
    device: torch.device

    @contextlib.contextmanager
    def span(self, kind: Kind, nbytes: int, *, on_device: bool = False) -> Iterator[None]:
        """What goes on within the context, on the host or on the current stream of the device."""
        clock = self.device if on_device else torch.device("cpu")
        begin = self.log.mark(clock)
        yield
        self.log.add(kind, self.group, self.device, begin, self.log.mark(clock), nbytes)


@contextlib.contextmanager
def record(model: nn.Module, schedule: Schedule | None) -> Iterator[Timeline]:
    """Within the context, all groups of `schedule` tell what they do."""
    if schedule is None:
        raise DispatchError(f"This {type(model).__name__} is not dispatched: nothing of it moves, so there is nothing to record.")
    pools = list(schedule.pools.values())
    if any(pool.log is not None for pool in pools):
        raise DispatchError("This model is being recorded already: end that recording first.")
    timeline = Timeline()
    log = Log([pool.device for pool in pools])
    for pool in pools:
        pool.log = log
    try:
        yield timeline
    finally:
        for pool in pools:
            pool.log = None
        timeline.activities = log.activities()
