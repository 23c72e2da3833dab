"""Flat pieces of memory that groups pass through, and the thread that fills them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from ..devices import has_streams, on_stream
from ..waiting import submitted
from .transforms import outside_transforms

if TYPE_CHECKING:
    from .layout import Reading
    from .recording import Recording

__all__ = ["Buffer", "Reader", "fill"]

_unrecorded = contextlib.nullcontext()


def _flat(nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    # Outside inference mode and transforms: a buffer that is made inside them could never serve a forward outside them.
    with torch.inference_mode(False), outside_transforms():
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


class Buffer:
    """A flat piece of memory on the execution device that holds one group at a time."""

    def __init__(self, nbytes: int, device: torch.device, *, beside: bool = False, overflow: bool = False) -> None:
        self.flat = _flat(nbytes, device)
        self.storage = self.flat.untyped_storage()
        self.nbytes = nbytes
        self.beside = beside
        """For groups that are in use while others are: these and the others do not take each other's buffers."""
        self.overflow = overflow
        """Made because all others were in use; freed after its first use."""
        self.generation = -1
        """The group's generation that was read into it."""
        self.ready: torch.Event | None = None
        """Recorded on the copy stream behind the copy that filled it."""
        self.used: list[torch.Event] = []
        """Recorded on compute streams behind the last work that reads it."""
        self.moved_bytes = 0
        """Bytes read into it since its group last asked."""
        self.stream = torch.accelerator.current_stream(device) if has_streams(device) else None
        self._own_references = torch._C._storage_Use_Count(self.storage._cdata)

    def held_elsewhere(self) -> bool:
        """Whether some tensor still points into it: a view that a forward returned, or what autograd saved for the backward."""
        return torch._C._storage_Use_Count(self.storage._cdata) > self._own_references


class _Staging:
    """Two pieces of page-locked memory in turn: while one is copied to the device, the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [_flat(0, torch.device("cpu"))] * 2
        self._copied: list[torch.Event | None] = [torch.Event(device) if has_streams(device) else None for _ in range(2)]
        self._turn = 0

    def take(self, nbytes: int) -> tuple[torch.Tensor, torch.Event | None]:
        """Memory to fill, and the event to record behind the copy out of it (None on a device without streams, where copies block)."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if self._memory[self._turn].numel() < nbytes:
            self._memory[self._turn] = _flat(nbytes, torch.device("cpu"), pinned=copied is not None)
        return self._memory[self._turn][:nbytes], copied


def fill(reading: Reading, buffer: Buffer, recording: Recording | None = None) -> None:
    """Reads a group's weights into a buffer in RAM."""
    if reading.nbytes <= buffer.nbytes:
        with recording.span("read", reading.nbytes) if recording is not None else _unrecorded:
            reading.fill(buffer.flat)
        buffer.generation = reading.generation
        buffer.moved_bytes += reading.nbytes


class Reader:
    """The thread that reads for a pool. It refers neither to the pool nor to any group, so that it keeps no model alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._ident: int | None = None
        self._last: Future[None] | None = None
        self._staging = _Staging(device) if device.type != "cpu" else None
        self._stream: torch.Stream | None = None

    def submit(self, reading: Reading, buffer: Buffer, recording: Recording | None = None) -> Future[None]:
        """Reads in the background, in the order of the calls."""
        with self._lock:
            self._last = submitted(self._started, fill if self._staging is None else self._fill_on_device, reading, buffer, recording)
            return self._last

    def run(self, task: Callable[[], None]) -> Future[None]:
        """Does something else in the background, behind the reads so far."""
        with self._lock:
            return submitted(self._started, task)

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bigmodel-reader")
        return self._thread

    def end(self) -> None:
        """Ends the thread; waits for a read under way, so that its memory is free when this returns."""
        with self._lock:
            thread, last = self._thread, self._last
            self._thread = self._last = None
        if thread is None:
            return
        thread.shutdown(wait=False, cancel_futures=True)
        if last is not None and not last.done() and threading.current_thread() not in thread._threads:
            # Bounded: a garbage collection may call this while its thread holds a lock of the store that the read needs.
            wait([last], timeout=1)

    def _fill_on_device(self, reading: Reading, buffer: Buffer, recording: Recording | None) -> None:
        """Store → page-locked staging memory → one copy on a stream of its own; nothing waits for the copy but events."""
        assert self._staging is not None
        if reading.nbytes > buffer.nbytes:
            return  # its dtype has changed since the buffer was chosen; whoever needs the group will see the old generation
        if self._stream is None and has_streams(self._device):
            self._stream = torch.Stream(self._device)
        staging, copied = self._staging.take(reading.nbytes)
        with recording.span("read", reading.nbytes) if recording is not None else _unrecorded:
            reading.fill(staging)
        copying = recording.span("copy", reading.nbytes, on_device=True) if recording is not None else _unrecorded
        if self._stream is None or copied is None:
            with torch.no_grad(), copying:
                buffer.flat[: staging.numel()].copy_(staging)
            buffer.generation = reading.generation
            buffer.moved_bytes += reading.nbytes
            return
        with on_stream(self._stream), torch.no_grad():
            for event in buffer.used:
                self._stream.wait_event(event)
            buffer.used = []
            with copying:
                buffer.flat[: staging.numel()].copy_(staging, non_blocking=True)
            buffer.flat.record_stream(self._stream)
            copied.record(self._stream)
            ready = torch.Event(self._device)
            ready.record(self._stream)
        buffer.ready = ready
        buffer.generation = reading.generation
        buffer.moved_bytes += reading.nbytes
