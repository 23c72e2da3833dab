"""Weights that are packed as they arrive: read in parts by the reading threads, each of which packs what it has read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

import torch

from ..devices import reading_threads
from ..progress import Progress
from ..protocols import Packer, Packing, TensorSpec
from ..waiting import LOOK_UP_SECONDS, submitted
from .host_memory import empty_tensor
from .reader import Reader
from .transfer import Computation, Transfer
from .workers import workers

__all__ = ["pack_weights"]

PART_BYTES: Final = 4 << 20
"""What a thread reads and packs at once. The unpacked weights in memory are this for each thread, however large the tensors are."""


@dataclass(slots=True)
class _Weight:
    name: str
    packing: Packing
    parts_left: int


def pack_weights(
    reader: Reader, jobs: Sequence[tuple[Transfer, torch.device]], packer: Packer, progress: Progress | None = None
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Name and kept tensors of each weight, as they become complete; packed on the device that is given with it.

    In memory beside what is kept: `PART_BYTES` for each reading thread. A weight that a function computes, or that is packed transposed,
    comes whole to its thread; of a stack whose matrices lie transposed in the file, one matrix does.
    Raises what reading and packing raise; then, and when the iterator is closed, no thread is at work any more.
    """
    parts = (part for transfer, device in _in_file_order(jobs) for part in _parts(transfer, device, packer))
    running: dict[Future[None], _Weight] = {}
    try:
        while True:
            while len(running) < reading_threads() and (following := next(parts, None)) is not None:
                weight, transfer, start, device = following
                running[submitted(workers, _read_and_pack, reader, transfer, start, device, weight.packing, progress)] = weight
            if not running:
                return
            # In short waits: a signal that comes in the moment before one does not end it.
            for future in wait(running, LOOK_UP_SECONDS, return_when=FIRST_COMPLETED).done:
                weight = running.pop(future)
                future.result()
                weight.parts_left -= 1
                if weight.parts_left == 0:
                    yield weight.name, weight.packing.finish()
    finally:
        for future in running:
            future.cancel()
        wait(running)


def _in_file_order(jobs: Sequence[tuple[Transfer, torch.device]]) -> list[tuple[Transfer, torch.device]]:
    def place(job: tuple[Transfer, torch.device]) -> tuple[str, int]:
        entry = next(job[0].entries(), None)
        return ("", 0) if entry is None else (str(entry.file), entry.offset)

    return sorted(jobs, key=place)


def _parts(transfer: Transfer, device: torch.device, packer: Packer) -> Iterator[tuple[_Weight, Transfer, int, torch.device]]:
    """The parts of one weight: what is read, and its first row."""
    spec = TensorSpec(transfer.shape, transfer.dtype)
    weight = _Weight(transfer.target, packer.begin(transfer.target, spec, device), 0)
    parts = _stack_parts(transfer, packer.row_step(spec)) if len(transfer.shape) > 2 else _row_parts(transfer, packer.row_step(spec))
    weight.parts_left = sum(1 if within is None else len(within) for _, within in parts)
    rows = transfer.shape[-2]
    for outer, within in parts:
        part = transfer.rows(outer.start, len(outer))
        if within is None:
            yield weight, part, outer.start * (rows if len(transfer.shape) > 2 else 1), device
            continue
        for start in within:
            length = min(within.step, rows - start)
            yield weight, part.box((0, start, 0), (1, length, transfer.shape[-1])), outer.start * rows + start, device


def _row_parts(transfer: Transfer, step: int) -> list[tuple[range, range | None]]:
    """Ranges of the rows of a matrix."""
    rows = transfer.shape[0]
    row_bytes = math.prod(transfer.shape[1:]) * transfer.dtype.itemsize
    at_once = rows if _is_computed(transfer) or _is_scattered(transfer) else max(1, PART_BYTES // max(1, step * row_bytes)) * step
    return [(range(start, min(start + at_once, rows)), None) for start in range(0, max(1, rows), max(1, at_once))]


def _stack_parts(transfer: Transfer, step: int) -> list[tuple[range, range | None]]:
    """Ranges of matrices of a stack; where single matrices are large, ranges of one with what begins its parts."""
    count, rows, columns = transfer.shape
    row_bytes = columns * transfer.dtype.itemsize
    if _is_computed(transfer):
        return [(range(count), None)]
    if not _is_scattered(transfer) and rows % step == 0 and rows * row_bytes > PART_BYTES:
        within = range(0, rows, max(1, PART_BYTES // max(1, step * row_bytes)) * step)
        return [(range(each, each + 1), within) for each in range(count)]
    whole = step // math.gcd(step, max(1, rows))
    at_once = max(1, PART_BYTES // max(1, whole * rows * row_bytes)) * whole
    return [(range(start, min(start + at_once, count)), None) for start in range(0, max(1, count), at_once)]


def _is_computed(transfer: Transfer) -> bool:
    return any(isinstance(piece.origin, Computation) for piece in transfer.pieces)


def _is_scattered(transfer: Transfer) -> bool:
    """Whether rows are all over the file: matrices that lie column by column."""
    return any(piece.source_strides[-1] != 1 for piece in transfer.pieces)


def _read_and_pack(
    reader: Reader, transfer: Transfer, start: int, device: torch.device, packing: Packing, progress: Progress | None
) -> None:
    rows = empty_tensor(transfer.shape, transfer.dtype, device)
    reader.read([(transfer, rows)], progress, in_this_thread=True)
    packing.pack(start, rows.flatten(0, -2))
