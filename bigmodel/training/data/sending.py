"""Batches on their way from the main process to the others: a frame for all, then tensors that do not fit in it, to each its own."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...dispatch import send_to_device
from ...errors import TrainingError
from ..agreement import host_group
from ..state import PartialState
from ..wire import as_bytes, wire_device
from .rows import flatten, rebuild

__all__ = ["Channel", "Note"]

FRAME_BYTES = 16 << 10
"""Of the first message of each step; gloo takes as long for 16 KiB as for 16 bytes. What does not fit follows."""

INLINE_BYTES = 8 << 10
"""Batches of up to so many bytes, of all shares together, travel within the frame."""

SIZE_BYTES = 8
"""At the start of the frame: the size of what it tells."""

ALIGNMENT_BYTES = 64
"""Where tensors begin among the bytes; a multiple of every element's size."""


@dataclass(frozen=True, slots=True)
class Note:
    """What goes with the batches of a step."""

    real: int
    """As `Step.real`."""
    last: bool
    """No other step follows."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor among the bytes."""

    offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch without the bytes of its tensors."""

    structure: Any
    leaves: list[Any]
    """`_Bytes` for a tensor."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Header:
    note: Note | None
    """None: there is no step."""
    failure: str | None
    batches: list[_Packed]
    """By share."""
    inline: list[bytes]
    """The bytes of the tensors, by share; empty: they follow."""


class Channel:
    """Between the main process and the others; each process makes its own, and all call it in step.

    Args:
        share_of: of every process, by rank, the number of its share.
        device: where batches are put.
        non_blocking: copies to the device do not wait.
    """

    def __init__(self, share_of: Sequence[int], device: torch.device, non_blocking: bool):
        state = PartialState()
        self.share_of = share_of
        self.rank = state.process_index
        self.distributed = state.use_distributed
        self.device = device
        self.wire = wire_device(state)
        self.host = host_group() if self.distributed else None
        self.non_blocking = non_blocking

    def send(self, pieces: Sequence[Any], note: Note) -> Any:
        """From the main process: `pieces[s]` to the processes of share `s`; returns its own."""
        if self.distributed:
            tensors: list[list[tuple[_Bytes, torch.Tensor]]] = []
            batches = [_pack(piece, tensors) for piece in pieces]
            inline: list[bytes] = []
            if sum(batch.nbytes for batch in batches) <= INLINE_BYTES:
                host = torch.device("cpu")
                inline = [_buffer(of_piece, batch.nbytes, host).numpy().tobytes() for of_piece, batch in zip(tensors, batches, strict=True)]
            self._tell(_Header(note, None, batches, inline))
            if not inline:
                nbytes = max(batch.nbytes for batch in batches)
                buffers = [_buffer(of_piece, nbytes, self.wire) for of_piece in tensors]
                own = torch.empty(nbytes, dtype=torch.uint8, device=self.wire)
                dist.scatter(own, [buffers[share] for share in self.share_of], 0)
        return send_to_device(pieces[self.share_of[self.rank]], self.device, self.non_blocking)

    def end(self, failure: BaseException | None = None) -> None:
        """From the main process: there is no step, or no other since reading failed."""
        if self.distributed:
            story = None if failure is None else f"{type(failure).__name__}: {failure}"
            self._tell(_Header(None, story, [], []))

    def receive(self) -> tuple[Any, Note] | None:
        """In the other processes: the batch of the next step; None: there is none.

        Raises:
            TrainingError: the main process could not read.
        """
        header = self._told()
        if header.failure is not None:
            raise TrainingError(f"The main process could not read the next batch: {header.failure}")
        if header.note is None:
            return None
        share = self.share_of[self.rank]
        batch = header.batches[share]
        if header.inline:
            buffer = torch.frombuffer(bytearray(header.inline[share] or b"\0"), dtype=torch.uint8)
        else:
            buffer = torch.empty(max(batch.nbytes for batch in header.batches), dtype=torch.uint8, device=self.wire)
            dist.scatter(buffer, None, 0)
        leaves = [_tensor(leaf, buffer) if isinstance(leaf, _Bytes) else leaf for leaf in batch.leaves]
        return send_to_device(rebuild(batch.structure, leaves), self.device, self.non_blocking), header.note

    def _tell(self, header: _Header) -> None:
        told = pickle.dumps(header)
        frame = bytearray(FRAME_BYTES)
        room = FRAME_BYTES - SIZE_BYTES
        frame[:SIZE_BYTES] = len(told).to_bytes(SIZE_BYTES, "little")
        frame[SIZE_BYTES : SIZE_BYTES + min(len(told), room)] = told[:room]
        dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), 0, group=self.host)
        if len(told) > room:
            dist.broadcast(torch.frombuffer(bytearray(told[room:]), dtype=torch.uint8), 0, group=self.host)

    def _told(self) -> _Header:
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        dist.broadcast(frame, 0, group=self.host)
        told = frame.numpy().tobytes()
        size = int.from_bytes(told[:SIZE_BYTES], "little")
        told = told[SIZE_BYTES : SIZE_BYTES + size]
        if len(told) < size:
            rest = torch.empty(size - len(told), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self.host)
            told += rest.numpy().tobytes()
        header: _Header = pickle.loads(told)
        return header


def _pack(piece: Any, tensors: list[list[tuple[_Bytes, torch.Tensor]]]) -> _Packed:
    leaves: list[Any] = []
    structure = flatten(piece, leaves)
    own: list[tuple[_Bytes, torch.Tensor]] = []
    offset = 0
    for index, leaf in enumerate(leaves):
        if type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_quantized and not leaf.is_nested:
            leaves[index] = _Bytes(offset, leaf.nbytes, leaf.dtype, leaf.shape)
            own.append((leaves[index], as_bytes(leaf)))
            offset += -(-leaf.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    tensors.append(own)
    return _Packed(structure, leaves, offset)


def _buffer(tensors: list[tuple[_Bytes, torch.Tensor]], nbytes: int, device: torch.device) -> torch.Tensor:
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for where, tensor in tensors:
        if where.nbytes:
            buffer[where.offset_bytes : where.offset_bytes + where.nbytes].copy_(tensor)
    return buffer


def _tensor(where: _Bytes, buffer: torch.Tensor) -> torch.Tensor:
    if not where.nbytes:
        return torch.empty(where.shape, dtype=where.dtype, device=buffer.device)
    return buffer[where.offset_bytes : where.offset_bytes + where.nbytes].view(where.dtype).view(where.shape)
