"""Tensors that share the pages of a checkpoint's files, for who asks for that."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import torch

from .entry import Entry, FileIdentity, contiguous_strides
from .files import OpenFiles
from .location import CheckpointFile, RemoteFile
from .transfer import Transfer

__all__ = ["mapped_tensors"]


def mapped_tensors(transfers: Iterable[Transfer], identities: Mapping[CheckpointFile, FileIdentity]) -> dict[str, torch.Tensor]:
    """By target, every transfer that needs no conversion as a tensor on pages of its file, which processes share.

    Left out is what is cast, pieced together, turned round, unaligned, empty or remote. Writing to a tensor changes this process's copy of
    the page, never the file. Who writes to the file in place changes the tensors, and who truncates it ends the process at the next
    access. Raises `CheckpointError` when a file is not the one that was opened.
    """
    chosen = {transfer.target: entry for transfer in transfers if (entry := _as_it_lies(transfer)) is not None}
    files = OpenFiles(identities)
    try:
        found = files.checked({entry.file for entry in chosen.values()})
        mappings = {
            file: mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            for file, descriptor in found.items()
        }
        files.checked(found)
    finally:
        files.close()
    with torch.inference_mode(False):
        return {
            target: torch.frombuffer(mappings[entry.file], dtype=entry.dtype, count=entry.numel, offset=entry.offset).view(entry.shape)
            for target, entry in chosen.items()
        }


def _as_it_lies(transfer: Transfer) -> Entry | None:
    """The entry whose bytes are the tensor."""
    if len(transfer.pieces) != 1 or transfer.nbytes == 0:
        return None
    piece = transfer.pieces[0]
    entry = piece.origin
    if not isinstance(entry, Entry) or entry.contents is not None or isinstance(entry.file, RemoteFile):
        return None
    is_whole = piece.shape == transfer.shape == entry.shape and piece.source_offset == 0
    is_in_order = piece.source_strides == contiguous_strides(entry.shape)
    return entry if is_whole and is_in_order and entry.dtype == transfer.dtype and entry.offset % entry.dtype.itemsize == 0 else None
