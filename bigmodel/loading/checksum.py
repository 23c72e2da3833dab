"""Checksums of the tensors in files that bigmodel packed: whether the bytes that are read are those that were written.

A file of packed weights is nobody's original that could be compared with it. Its metadata hold for each tensor a hash of the sums of its
pages (64-bit words, modulo 2⁶⁴), which are added up about as fast as memory is read, on any device (12 GB/s; CRC-32 makes 2). A flipped
bit and a lost, doubled or misplaced page do not get past that; several flips in one page may cancel out, and who wants to deceive can.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from ..errors import CheckpointError
from .entry import Entry
from .transfer import Transfer

__all__ = ["Checksum", "check_tensors", "checksum", "checksums_in", "mismatch", "not_compared", "noted", "room_for"]

KEY: Final = "checksum:"
"""What a tensor's name in the metadata begins with."""
DIGITS: Final = 16
PAGE_BYTES: Final = 4096
SERIAL_PAGES: Final = 63
"""Added up at once on the CPU: torch hands more than 32768 numbers to all its threads, which wait for each other where others work too."""


class Checksum:
    """Of bytes that come in parts: all but the last are whole pages."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=DIGITS // 2)

    def update(self, part: torch.Tensor) -> None:
        """Takes flat bytes (uint8) on any device."""
        whole = part.numel() // PAGE_BYTES * PAGE_BYTES
        if whole:
            pages = part[:whole]
            pages = pages if pages.data_ptr() % 8 == 0 and pages.storage_offset() % 8 == 0 else pages.clone()
            step = SERIAL_PAGES if pages.device.type == "cpu" else whole
            sums = [some.sum(1) for some in pages.view(torch.int64).view(-1, PAGE_BYTES // 8).split(step)]
            self._digest.update(torch.cat(sums).cpu().numpy().data)
        self._digest.update(part[whole:].cpu().numpy().tobytes())

    def digits(self) -> str:
        """The checksum in hexadecimal digits."""
        return self._digest.hexdigest()


def checksum(tensor: torch.Tensor) -> str:
    """The checksum of a tensor's bytes, row-major, on any device."""
    made = Checksum()
    made.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return made.digits()


def room_for(names: Iterable[str]) -> dict[str, str]:
    """Metadata that are as long as those with the checksums of these tensors, which are known when all are written."""
    return noted(dict.fromkeys(names, "0" * DIGITS))


def noted(checksums: Mapping[str, str]) -> dict[str, str]:
    """The metadata that hold these checksums, by name of the tensor."""
    return {f"{KEY}{name}": digits for name, digits in checksums.items()}


def checksums_in(metadata: Mapping[str, str]) -> dict[str, str]:
    """The checksums that metadata hold, by name of the tensor."""
    return {key.removeprefix(KEY): digits for key, digits in metadata.items() if key.startswith(KEY)}


def check_tensors(read: Iterable[tuple[Transfer, torch.Tensor]], checksums: Mapping[str, str]) -> None:
    """Compares tensors that have been read, as far as they are whole and as they lie in a file that has checksums.

    Raises `CheckpointError`, naming the first that holds other bytes.
    """
    for transfer, tensor in read if checksums else ():
        entry = _whole_entry(transfer)
        expected = None if entry is None else checksums.get(entry.name)
        if entry is not None and expected is not None and tensor.dtype == entry.dtype and checksum(tensor) != expected:
            raise mismatch(entry)


def not_compared(read: Iterable[Transfer], checksums: Mapping[str, str]) -> dict[Entry, str]:
    """Of tensors that are read in parts or become others: the entries in them that have checksums, which `check_tensors` cannot compare."""
    others = [transfer for transfer in read if _whole_entry(transfer) is None] if checksums else []
    ranges: defaultdict[str, dict[tuple[int, int], Entry]] = defaultdict(dict)
    for entry in (entry for transfer in others for entry in transfer.entries() if entry.name in checksums):
        ranges[entry.name][entry.offset, entry.nbytes] = entry
    # An entry of several ranges stands for parts of a tensor; a checksum is of the whole.
    return {entry: checksums[name] for name, found in ranges.items() if len(found) == 1 for entry in found.values()}


def mismatch(entry: Entry) -> CheckpointError:
    """The error for other bytes than were written."""
    return CheckpointError(
        f"{entry.file}: {entry.name!r}: the bytes are not those that were written (their checksum differs): the file is damaged. Get "
        "or save it again (a cache beside a checkpoint: delete it, and it is made anew). If it happens again, look after the "
        "disk and the memory."
    )


def _whole_entry(transfer: Transfer) -> Entry | None:
    """The entry that is all of the transfer, as it is; None where there is none."""
    if len(transfer.pieces) != 1:
        return None
    (piece,) = transfer.pieces
    origin = piece.origin
    if not isinstance(origin, Entry) or not origin.is_plain or transfer.shape != origin.shape or origin.dtype != transfer.dtype:
        return None
    return origin if piece.shape == origin.shape and piece.source_strides == origin.element_strides else None
