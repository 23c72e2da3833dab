"""Tensors that share the pages of a checkpoint's files, for who asks for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .entry import FileIdentity
from .files import OpenFiles
from .location import CheckpointFile
from .mapping import map_privately
from .pages import range_of, tensor_on
from .transfer import Transfer

__all__ = ["mapped_tensors"]


def mapped_tensors(transfers: Iterable[Transfer], identities: Mapping[CheckpointFile, FileIdentity]) -> dict[str, torch.Tensor]:
    """By target, every transfer that needs no conversion as a tensor on pages of its file, which processes share.

    Left out is what is cast, pieced together, turned round, unaligned, empty or remote. Writing to a tensor changes this process's copy of
    the page, never the file. Who writes to the file in place changes the tensors, and who truncates it ends the process at the next
    access. Raises `CheckpointError` when a file is not the one that was opened, and where the system does not map it.
    """
    chosen = [(transfer, place) for transfer in transfers if (place := range_of(transfer)) is not None]
    chosen = [(transfer, place) for transfer, place in chosen if place[1] % transfer.dtype.itemsize == 0]
    files = OpenFiles(identities)
    try:
        found = files.checked({file for _, (file, _) in chosen})
        mappings = {file: _mapping(file, descriptor) for file, descriptor in found.items()}
        files.checked(found)
    finally:
        files.close()
    return {transfer.target: tensor_on(mappings[file], transfer, offset) for transfer, (file, offset) in chosen}


def _mapping(file: CheckpointFile, descriptor: int) -> Any:
    try:
        return map_privately(descriptor)
    except OSError as error:
        raise CheckpointError(f"{file}: the system does not map it ({error}). Load without mmap=True.") from error
