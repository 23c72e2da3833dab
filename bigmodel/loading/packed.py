"""The packed weights of a load: packed now or read from where an earlier load kept them, resident or on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from ..atomic import atomic_file, folder_to_write
from ..errors import CheckpointError
from ..progress import Progress
from ..protocols import Packer, TensorSpec
from .checkpoint import Checkpoint
from .checksum import check_tensors, checksums_in
from .entry import Entry, FileIdentity
from .host_memory import empty_tensor
from .keys import Whole
from .location import CheckpointFile
from .packing import pack_weights
from .private_folder import PrivateFolder
from .reader import Reader
from .tensor_file import TensorFile
from .transfer import Transfer, lower

__all__ = ["PackedWeights", "bring_packed", "kept_packed"]

CPU = torch.device("cpu")
META = torch.device("meta")
PACKED_FROM: Final = "packed_from"
"""In the metadata of a file of packed weights: what tells which tensors they were packed from, and how."""


@dataclass(slots=True)
class PackedWeights:
    """What became of the weights that a packer took."""

    tensors: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Weight → full name of a kept tensor → the tensor; on meta where it stays on disk."""
    on_disk: dict[str, Transfer] = field(default_factory=dict)
    """What reads the kept tensors that are on disk."""
    identities: dict[CheckpointFile, FileIdentity] = field(default_factory=dict)
    """The files that these are in."""
    bytes_read: int = 0
    """Bytes of the files that were read for them."""
    folder: PrivateFolder | None = None
    """The private folder that they are in, which goes when nothing reads it any more; None for a file that the caller named."""


def kept_packed(file: Path | None, weights: Mapping[str, Transfer], packer: Packer) -> Checkpoint | None:
    """The file in which an earlier load kept the same weights packed; None where it is not there or holds something else."""
    if file is None or not file.is_file():
        return None
    try:
        kept = Checkpoint.open(file)
    except CheckpointError:
        return None
    if kept.metadata.get(PACKED_FROM) != _packed_from(weights):
        return None
    for name, transfer in weights.items():
        for each, spec in packer.kept(name, _spec(transfer)).items():
            entry = kept.entries.get(each)
            if entry is None or (entry.shape, entry.dtype) != (spec.shape, spec.dtype):
                return None
    return kept


def _packed_from(weights: Mapping[str, Transfer]) -> str:
    """The same text for weights that are made of the same views of the same tensors of a checkpoint, in the same dtypes."""
    return hashlib.sha256(json.dumps(sorted((name, _described(transfer)) for name, transfer in weights.items())).encode()).hexdigest()


def _described(transfer: Transfer) -> list[Any]:
    pieces: list[Any] = []
    for piece in transfer.pieces:
        origin = piece.origin
        if isinstance(origin, Entry):
            made_of: list[Any] = [origin.name, str(origin.dtype)]
        else:
            called = getattr(origin.function, "__qualname__", type(origin.function).__name__)
            made_of = [called, [_described(part) for part in origin.inputs]]
        pieces.append([piece.start, piece.shape, piece.source_offset, piece.source_strides, made_of])
    return [transfer.shape, str(transfer.dtype), pieces]


def bring_packed(
    reader: Reader,
    weights: Mapping[str, Transfer],
    devices: Mapping[str, torch.device | None],
    packer: Packer,
    file: Path | None,
    kept: Checkpoint | None,
    progress: Progress,
) -> PackedWeights:
    """Packs the weights, each for its device (None: it rests on disk), or reads them from `kept`. All of them are kept in `file`, if given.

    Raises `CheckpointError` when the file cannot be written, or holds other bytes than were.
    """
    if kept is not None:
        return _read_kept(weights, devices, packer, kept, progress)
    result = PackedWeights(bytes_read=sum(transfer.bytes_to_read for transfer in weights.values()))
    specs = {name: packer.kept(name, _spec(transfer)) for name, transfer in weights.items()}
    written = {name: spec for name, each in specs.items() if file is not None or devices[name] is None for name, spec in each.items()}
    if written and file is None:
        result.folder = PrivateFolder()
        file = result.folder.path / "packed.safetensors"
    own = file
    # Another process, or thread, may have packed the same in the meantime, and be reading its file: that one is read here, too.
    with _stream(file if written else None, lambda: kept_packed(own, weights, packer) is not None) as stream:
        target = None if stream is None else TensorFile(stream, written, {"format": "pt", PACKED_FROM: _packed_from(weights)})
        jobs = [(transfer, devices[name] or CPU) for name, transfer in weights.items()]
        for name, tensors in pack_weights(reader, jobs, packer, progress):
            for each in tensors if target is not None else ():
                if each in written:
                    target.write(each, tensors[each])  # type: ignore[union-attr]
            result.tensors[name] = {each: tensor.to(META) for each, tensor in tensors.items()} if devices[name] is None else tensors
        if target is not None:
            target.finish()
    if written:
        assert file is not None
        _rest(result, weights, devices, Checkpoint.open(file))
    return result


@contextlib.contextmanager
def _stream(file: Path | None, stays: Callable[[], bool]) -> Iterator[BinaryIO | None]:
    if file is None:
        yield None
        return
    with folder_to_write(file.parent), atomic_file(file, stays) as stream:
        yield stream


def _read_kept(
    weights: Mapping[str, Transfer], devices: Mapping[str, torch.device | None], packer: Packer, kept: Checkpoint, progress: Progress
) -> PackedWeights:
    result = PackedWeights()
    jobs: list[tuple[Transfer, torch.Tensor]] = []
    for name, transfer in weights.items():
        tensors: dict[str, torch.Tensor] = {}
        for each, spec in packer.kept(name, _spec(transfer)).items():
            tensors[each] = empty_tensor(spec.shape, spec.dtype, devices[name] or META)
            if devices[name] is not None:
                jobs.append((lower(Whole(each), kept.entries, each, spec.dtype), tensors[each]))
        result.tensors[name] = tensors
    reader = Reader(kept.identities)
    try:
        result.bytes_read = reader.read(jobs, progress)
    finally:
        reader.close()
    check_tensors(jobs, checksums_in(kept.metadata))
    _rest(result, weights, devices, kept)
    return result


def _rest(result: PackedWeights, weights: Mapping[str, Transfer], devices: Mapping[str, torch.device | None], kept: Checkpoint) -> None:
    """Notes what reads the tensors that stay on disk."""
    for name in weights:
        if devices[name] is None:
            for each, tensor in result.tensors[name].items():
                result.on_disk[each] = lower(Whole(each), kept.entries, each, tensor.dtype)
    if result.on_disk:
        result.identities = dict(kept.identities)


def _spec(transfer: Transfer) -> TensorSpec:
    return TensorSpec(transfer.shape, transfer.dtype)
