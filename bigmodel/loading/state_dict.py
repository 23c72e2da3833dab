"""One checkpoint file as a dict of tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from ..device_map import device_for, normalized
from ..devices import as_device
from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .entry import FileIdentity
from .formats.header import START_BYTES, Header, foreign, read_local
from .formats.torch_zip import TorchZipFormat
from .host_memory import empty_host_tensor
from .keys import Whole
from .location import CheckpointFile, located
from .reader import Reader
from .transfer import lower

__all__ = ["load_state_dict", "read_tensors"]

logger = logging.getLogger(__name__)


def load_state_dict(checkpoint_file: str | Path, device_map: Mapping[str, object] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file or of one that `torch.save` wrote, in memory of their own.

    Each goes to the device of its entry in `device_map`; "disk", unmapped names and a file of torch go to CPU. Raises `CheckpointError` for
    a damaged file, OSError for safetensors of an unknown framework, ValueError for tensors of tf or flax.
    """
    place = located(checkpoint_file)
    file = place if isinstance(place, Path) else Path(checkpoint_file)
    if file.suffix != ".safetensors":
        FileIdentity.of(file)
        return _by_torch(file)
    checkpoint = Checkpoint.open(file)
    framework = checkpoint.metadata.get("format")
    if framework is None:
        logger.warning("%s: does not say which framework its tensors are for (metadata 'format'); taken as PyTorch's.", file)
    elif framework in ("tf", "flax"):
        raise ValueError(f"{file}: its tensors are laid out for {framework!r}, not for PyTorch; convert it first.")
    elif framework != "pt":
        raise OSError(f"{file}: its metadata names the unknown framework {framework!r}; known is 'pt'.")
    devices = normalized(device_map or {})
    jobs = []
    for name, entry in checkpoint.entries.items():
        key = device_for(name, devices)
        device = torch.device("cpu") if key is None or key == "disk" else as_device(key)
        transfer = lower(Whole(name), checkpoint.entries, name, entry.dtype)
        is_host = device.type == "cpu"
        tensor = empty_host_tensor(entry.shape, entry.dtype) if is_host else torch.empty(entry.shape, dtype=entry.dtype, device=device)
        jobs.append((transfer, tensor))
    reader = Reader(checkpoint.identities, "auto")
    try:
        reader.read(jobs, fresh=True)
    finally:
        reader.close()
    return {transfer.target: tensor for transfer, tensor in jobs}


def _by_torch(file: Path) -> dict[str, torch.Tensor]:
    """What torch reads from a file. Raises `CheckpointError` for what it does not read, with what the file is."""
    try:
        state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes torch stumble over
        read_local(file, partial(_explain, error=error))
        raise
    return state


def _explain(file: CheckpointFile, size_bytes: int, read: Callable[[int, int], bytes], error: Exception) -> Header:
    start = read(0, START_BYTES)
    if start.startswith(b"PK"):
        try:
            TorchZipFormat().header_from(file, size_bytes, read)
        except CheckpointError as told:
            raise CheckpointError(f"{told} (Asked of torch.load with weights_only=True.)") from error
    if not start:
        raise CheckpointError(f"{file}: the file is empty. Get it again.") from error
    story = (
        foreign(start) or f"torch.load(..., weights_only=True) cannot read it ({type(error).__name__}); it is damaged, or none of torch's."
    )
    raise CheckpointError(f"{file}: {story}") from error


def read_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint, by name, on CPU. Raises `CheckpointError` when a file has changed."""
    entries = checkpoint.entries
    values = {name: empty_host_tensor(entries[name].shape, entries[name].dtype) for name in names}
    reader = Reader(checkpoint.identities)
    try:
        reader.read([(lower(Whole(name), entries, name, value.dtype), value) for name, value in values.items()])
    finally:
        reader.close()
    return values
