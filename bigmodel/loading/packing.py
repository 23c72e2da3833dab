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
    comes whole to its thread.
    Raises what reading and packing raise; then, and when the iterator is closed, no thread is at work any more.
    """
    parts = (part for transfer, device in _in_file_order(jobs) for part in _parts(transfer, device, packer))
    running: dict[Future[None], _Weight] = {}
    pool = workers()
    try:
        while True:
            while len(running) < reading_threads() and (following := next(parts, None)) is not None:
                weight, transfer, start, device = following
                running[pool.submit(_read_and_pack, reader, transfer, start, device, weight.packing, progress)] = weight
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
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
    rows = transfer.shape[0]
    # Rows of what lies column by column in the file are all over it.
    whole = any(isinstance(piece.origin, Computation) or piece.source_strides[-1] != 1 for piece in transfer.pieces)
    step = packer.row_step(spec)
    row_bytes = math.prod(transfer.shape[1:]) * transfer.dtype.itemsize
    at_once = rows if whole else max(1, PART_BYTES // max(1, step * row_bytes)) * step
    starts = range(0, max(1, rows), max(1, at_once))
    weight = _Weight(transfer.target, packer.begin(transfer.target, spec, device), len(starts))
    for start in starts:
        yield weight, transfer.rows(start, min(at_once, rows - start)), start, device


def _read_and_pack(
    reader: Reader, transfer: Transfer, start: int, device: torch.device, packing: Packing, progress: Progress | None
) -> None:
    rows = empty_tensor(transfer.shape, transfer.dtype, device)
    reader.read([(transfer, rows)], progress, in_this_thread=True)
    packing.pack(start, rows)
