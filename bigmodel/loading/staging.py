"""What a reading thread holds between a file and the tensors: staging memory, and for accelerators a side stream for the copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..devices import has_streams, on_stream
from .copying import put_range
from .ranges import GAP_BYTES, Batch, Range

__all__ = ["Staging", "side_streams"]


def side_streams(destinations: Sequence[torch.Tensor]) -> dict[torch.device, torch.Stream]:
    """A stream for copies to each accelerator among the destinations, behind what the calling thread has queued there.

    One for all threads: strided copies of several threads interleave in a destination.
    """
    streams = {device: torch.Stream(device=device) for device in {each.device for each in destinations} if has_streams(device)}
    for device, stream in streams.items():
        # A destination's memory may have been somebody else's a moment ago, with work of his still queued.
        stream.wait_stream(torch.accelerator.current_stream(device))
    return streams


class Staging:
    """The staging memory of one thread. Copies to accelerators are queued on side streams, out of pinned memory.

    While one buffer's bytes are on their way to a device, the next batch is read into the other. `finish` waits for all copies.
    """

    def __init__(self, destinations: Sequence[torch.Tensor], streams: Mapping[torch.device, torch.Stream]) -> None:
        self._destinations = destinations
        self._streams = streams
        self._buffers: list[torch.Tensor | None] = [None, None] if streams else [None]
        self._events: list[list[torch.Event]] = [[] for _ in self._buffers]
        self._turn = 0

    @property
    def is_immediate(self) -> bool:
        """Whether whatever is put is in its place when `put` returns."""
        return not self._streams

    def next_buffer(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for a batch's staged ranges, and for the bytes between ranges. Waits for the copies out of it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        events = self._events[self._turn]
        while events:
            events.pop().synchronize()
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < batch.staged_bytes + GAP_BYTES:
            buffer = self._buffers[self._turn] = self._new(batch.staged_bytes + GAP_BYTES)
        return buffer[GAP_BYTES:], buffer[:GAP_BYTES]

    def _new(self, nbytes: int) -> torch.Tensor:
        if self._streams:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:
                pass  # the system pins no more: copies out of pageable memory are slower, and just as right
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def put(self, copies: Sequence[tuple[Range, torch.Tensor]]) -> None:
        """Copies the staged bytes of ranges into their destinations, at once on the host and in time on accelerators."""
        used: set[torch.device] = set()
        for each, staged in copies:
            destination = self._destinations[each.job]
            stream = self._streams.get(destination.device)
            if stream is None:
                put_range(each, staged, destination)
                continue
            with on_stream(stream):
                if each.dtype.itemsize < destination.dtype.itemsize and each.rounded in (each.dtype, destination.dtype):
                    # Fewer bytes cross the link, and the device casts them.
                    staged = staged.to(destination.device, non_blocking=True)
                put_range(each, staged, destination, non_blocking=True)
            used.add(destination.device)
        self._events[self._turn] += [self._streams[device].record_event() for device in used]

    def finish(self) -> None:
        """Waits until nothing of this thread is on its way any more."""
        for stream in self._streams.values():
            stream.synchronize()
