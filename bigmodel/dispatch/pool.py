"""The memory that groups pass through on one execution device: a bounded set of flat buffers, reused, filled ahead by a reader thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from ..constants import MiB
from ..devices import has_streams
from ..errors import BigModelError
from ..waiting import result_of, wait_until_done
from .buffers import Buffer, Reader, fill
from .recording import Log, Recording

if TYPE_CHECKING:
    from .group import Group

__all__ = ["Pool"]

_BUFFERS = 2
"""One computes while the next one is filled."""

_SMALL_BYTES = 8 * MiB
"""What a ring in RAM may take in any case: groups so small that many fit are then read once. On a device, every byte is the plan's."""


def _read_pages(recording: Recording, nbytes: int, read: Callable[[], None]) -> None:
    with recording.span("read", nbytes):
        read()


class Pool:
    """Buffers on `device`, at most `ring_bytes` of them (default: room for the two largest groups that pass, sized as they pass)."""

    def __init__(self, device: torch.device, ring_bytes: int | None = None) -> None:
        self.device = device
        self.ring_bytes = ring_bytes
        self.largest_bytes = 0
        """Bytes of the largest group that passes through."""
        self.largest_beside_bytes = 0
        """Bytes of the largest group that is in use while others are."""
        self.overflows = 0
        self.log: Log | None = None
        """What is told of everything that passes; usually none."""
        self._lock = threading.Lock()
        self._ahead_lock = threading.Lock()
        self._buffers: list[Buffer] = []
        # What lies in buffers that nobody uses now, oldest first: fetched ahead, or left by the group's last use.
        # By the group's key: a group refers to its pool, and the last reference to a model frees both.
        self._idle: dict[int, tuple[Buffer, Future[None] | None]] = {}
        self._empty: list[Buffer] = []
        self._on_accelerator = device.type != "cpu"
        self._has_streams = has_streams(device)
        self._reader = Reader(device)
        weakref.finalize(self, self._reader.end)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def limit_bytes(self) -> int:
        """What the buffers may take together."""
        if self.ring_bytes is not None:
            return self.ring_bytes
        return max(_BUFFERS * (self.largest_bytes + self.largest_beside_bytes), 0 if self._on_accelerator else _SMALL_BYTES)

    def register(self, group: Group) -> None:
        """A group will pass, of its present size."""
        if group.beside:
            self.largest_beside_bytes = max(self.largest_beside_bytes, group.nbytes)
        else:
            self.largest_bytes = max(self.largest_bytes, group.nbytes)

    # --- Taking and giving back ---

    def obtain(self, group: Group) -> tuple[Buffer, bool]:
        """The buffer that holds `group`'s weights, filled, and whether it was there or on its way before. Blocks until it is filled."""
        with self._lock:
            buffer, pending = self._idle.pop(group.key, (None, None))
        if buffer is not None:
            try:
                if pending is not None:
                    result_of(pending)
            except BaseException:
                self._give_back(buffer, pending)
                raise
            if buffer.generation == group.generation and buffer.nbytes >= group.nbytes:
                return buffer, True
            self._give_back(buffer, pending)
            buffer = None  # it may be what has to make room
        buffer = self._acquire(group, ahead=False)
        assert buffer is not None
        reading: Future[None] | None = None
        try:
            if self._on_accelerator:
                reading = self._submit(group, buffer)
                result_of(reading)
            else:
                fill(group.reading, buffer, self._recording(group))
        except BaseException:
            self._give_back(buffer, reading)
            raise
        return buffer, False

    def fetch_ahead(self, group: Group) -> bool:
        """Starts reading `group` in the background unless it is here or on its way; False if no buffer is free."""
        with self._ahead_lock:  # two threads that expect the same group fetch it once
            if group.in_use or group.nbytes == 0:
                return True
            with self._lock:
                known = self._idle.get(group.key)
                if known is not None and (known[1] is not None or known[0].generation == group.generation):
                    self._idle[group.key] = self._idle.pop(group.key)  # to be given up last
                    return True
            buffer = self._acquire(group, ahead=True)
            if buffer is None:
                return False
            with self._lock:
                stale = self._idle.pop(group.key, None)
                self._idle[group.key] = (buffer, self._submit(group, buffer))
            if stale is not None:
                self._give_back(stale[0], stale[1])
            return True

    def read_ahead(self, group: Group) -> None:
        """Begins to read those pages of files that `group` will be used on and that are not in memory, once for each use."""
        with self._ahead_lock:
            if group.pages_ahead is None and not group.in_use:
                group.pages_ahead = []
                with contextlib.suppress(BigModelError):  # the group's use will tell it
                    group.pages_ahead = [self._reader.run(read) for read in self.recorded_pages(group)]

    def recorded_pages(self, group: Group) -> list[Callable[[], None]]:
        """What brings the absent pages of `group` into memory; it tells the log."""
        recording = self._recording(group)
        absent = group.absent_pages()
        return absent if recording is None else [functools.partial(_read_pages, recording, group.paged_bytes, read) for read in absent]

    def release(self, buffer: Buffer, group: Group) -> None:
        """The last forward that used `buffer` is over; what lies in it stays until the memory is needed."""
        passed_on = buffer.overflow or buffer.held_elsewhere()
        # Behind that look: another thread may have read a weight past its module, as long as it was there, and let go of it just now.
        self.mark_used(buffer)
        if passed_on:
            # Whoever holds a view of it (autograd, a returned slice) keeps the memory; the pool makes itself a new buffer.
            self._forget(buffer)
            return
        with self._lock:
            if group.key in self._idle:
                self._empty.append(buffer)
            else:
                self._idle[group.key] = (buffer, None)

    def mark_used(self, buffer: Buffer) -> None:
        """Work that reads `buffer` has been queued on the current stream."""
        if self._has_streams:
            stream = torch.accelerator.current_stream(self.device)
            event = torch.Event(self.device)
            event.record(stream)
            buffer.used = [earlier for earlier in buffer.used if not earlier.query()] + [event]
            if stream != buffer.stream:
                buffer.flat.record_stream(stream)

    def wait_ready(self, buffer: Buffer) -> None:
        """Work queued on the current stream from now on runs after the copy into `buffer`."""
        if buffer.ready is not None:
            torch.accelerator.current_stream(self.device).wait_event(buffer.ready)

    def forget(self, groups: Iterable[Group]) -> None:
        """Groups that will not come again: what lies in buffers for them is of no use."""
        with self._lock:
            dropped = [self._idle.pop(group.key) for group in groups if group.key in self._idle]
        for buffer, pending in dropped:
            if pending is not None:
                wait_until_done(pending)
            self._give_back(buffer, pending)

    def close(self) -> None:
        """Ends the reader thread and frees the buffers."""
        self._reader.end()
        self._reader = Reader(self.device)
        weakref.finalize(self, self._reader.end)
        with self._lock:
            self._idle.clear()
            self._empty.clear()
            self._buffers.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        made = Pool(self.device, self.ring_bytes)
        made.largest_bytes, made.largest_beside_bytes = self.largest_bytes, self.largest_beside_bytes
        memo[id(self)] = made
        return made

    # --- Inside ---

    def _acquire(self, group: Group, *, ahead: bool) -> Buffer | None:
        """A buffer for `group` that nobody uses.

        With `ahead` None, rather than one whose content was fetched ahead, or memory beyond the ring.
        """
        while True:
            with self._lock:
                buffer, unwanted = self._find(group, ahead=ahead)
            if unwanted is None:
                return buffer
            wait_until_done(unwanted)  # what is read for a group that did not come after all: its memory is free in a moment

    def _find(self, group: Group, *, ahead: bool) -> tuple[Buffer | None, Future[None] | None]:
        """A buffer for `group`, or a read under way to wait for before memory beyond the ring is taken."""
        nbytes, beside = group.nbytes, group.beside
        fits = [buffer for buffer in self._empty if buffer.nbytes >= nbytes and buffer.beside == beside]
        if fits:
            buffer = min(fits, key=lambda candidate: candidate.nbytes)
            self._empty.remove(buffer)
            return buffer, None
        # Asked first: a read that ends while room is looked for has made some.
        unwanted = next((pending for _, pending in self._idle.values() if pending is not None and not pending.done()), None)
        # Of what makes room no variable may be left when the new memory is asked for: it would still be there.
        with contextlib.suppress(torch.OutOfMemoryError):
            found = self._reused(nbytes, beside, ahead=ahead)
            if found is not None:
                return found, None
            if self._make_room(nbytes, beside, ahead=ahead):
                return self._allocate(nbytes, beside), None
            if ahead:
                return None, None
            if unwanted is not None:
                return None, unwanted
            self.overflows += 1
            return self._allocate(nbytes, beside, overflow=True), None
        if ahead:
            return None, None
        # Something else has taken the device's memory: what is kept for later goes first.
        for key, _ in self._unused(ahead=False):
            del self._idle[key]
        self._empty.clear()
        self._buffers = []
        return self._allocate(nbytes, beside, overflow=True), None

    def _unused(self, *, ahead: bool) -> list[tuple[int, Buffer]]:
        """What lies in buffers without being used or written, what may go first first."""
        left = [(key, buffer) for key, (buffer, pending) in self._idle.items() if pending is None]
        if not ahead:
            # What was fetched ahead for a group that did not come after all.
            left += [(key, buffer) for key, (buffer, pending) in self._idle.items() if pending is not None and pending.done()]
        return left

    def _has_room(self, nbytes: int, beside: bool) -> bool:
        # Many small buffers would have to go whenever a large group comes.
        most = max(_BUFFERS, self.limit_bytes // max(self.largest_bytes, 1))
        count = sum(not buffer.beside for buffer in self._buffers)
        return self.limit_bytes - self.nbytes >= nbytes and (beside or count < most)

    def _reused(self, nbytes: int, beside: bool, *, ahead: bool) -> Buffer | None:
        """A buffer whose content nobody uses, where there is no room for another one."""
        if self._has_room(nbytes, beside):
            return None
        for key, buffer in self._unused(ahead=ahead):
            if buffer.nbytes >= nbytes and buffer.beside == beside:
                del self._idle[key]
                return buffer
        return None

    def _make_room(self, nbytes: int, beside: bool, *, ahead: bool) -> bool:
        """Whether there is room for another buffer; small ones, of which none is large enough, make it."""
        if self._has_room(nbytes, beside):
            return True
        left = self._unused(ahead=ahead)
        while self._empty or left:
            if self._empty:
                small = self._empty.pop()
            else:
                key, small = left.pop(0)
                del self._idle[key]
            self._buffers.remove(small)
            if self.limit_bytes - self.nbytes >= nbytes:
                return True
        return False

    def _allocate(self, nbytes: int, beside: bool, *, overflow: bool = False) -> Buffer:
        buffer = Buffer(nbytes, self.device, beside=beside, overflow=overflow)
        self.mark_used(buffer)  # the allocator may give memory that work already queued on this stream still uses
        if not overflow:
            self._buffers.append(buffer)
        return buffer

    def _give_back(self, buffer: Buffer, pending: Future[None] | None) -> None:
        """Puts a buffer whose content is of no use among the empty ones, unless a reader may still be writing to it."""
        with self._lock:
            if pending is not None and not pending.done():
                self._buffers = [other for other in self._buffers if other is not buffer]
            elif not buffer.overflow:
                buffer.generation = -1
                self._empty.append(buffer)

    def _forget(self, buffer: Buffer) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._buffers.remove(buffer)

    def _submit(self, group: Group, buffer: Buffer) -> Future[None]:
        return self._reader.submit(group.reading, buffer, self._recording(group))

    def _recording(self, group: Group) -> Recording | None:
        return None if self.log is None else Recording(self.log, group.name, self.device)
