"""Loading a checkpoint into a model under the name that scripts know: open, match, check, materialize; an index for what stays on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from ..atomic import folder_to_write, write_atomically
from ..constants import OFFLOAD_INDEX_NAME
from ..device_map import normalized, unknown_entries
from ..devices import DeviceKey
from ..errors import BigModelError, CheckpointError, PlanError
from ..progress import ProgressCallback
from ..protocols import Packer
from .checkpoint import Checkpoint
from .dtypes import dtype_rule
from .entry import Sharded
from .folder_owner import OWNER_NAME, check_owner, write_owner
from .host_memory import empty_host_tensor
from .keys import KeyRules
from .location import CheckpointFile, RemoteFile
from .match import DtypeOf, Match, match
from .materialize import materialize, placements
from .offload_folder import load_offloaded_weight
from .reader import Reader
from .report import LoadReport
from .set_tensor import set_module_tensor_to_device
from .ways import Reading

__all__ = ["load", "load_checkpoint_in_model", "load_offloaded_weights"]

logger = logging.getLogger(__name__)


def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: Mapping[str, object] | None = None,
    *,
    rules: KeyRules | None = None,
    dtype_of: DtypeOf | None = None,
    ignore_missing: Collection[str] = (),
    ignore_unexpected: Collection[str] = (),
    strict: bool = False,
    offload_buffers: bool = False,
    packer: Packer | None = None,
    packed_file: Path | None = None,
    mmap: bool = False,
    reading: Reading = "auto",
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> LoadReport:
    """Everything from an open checkpoint to a filled model; see `match`, `Match.check` and `materialize` for arguments and errors.

    Entries that fill nothing are a warning. No file is written.
    """
    found = match(
        model, checkpoint, rules, dtype_of=dtype_of, ignore_missing=list(ignore_missing), ignore_unexpected=list(ignore_unexpected)
    )
    found.check(strict=strict)
    _report_unexpected(model, found)
    return materialize(
        model,
        found,
        device_map,
        offload_buffers=offload_buffers,
        packer=packer,
        packed_file=packed_file,
        mmap=mmap,
        reading=reading,
        progress=progress,
        progress_callback=progress_callback,
    )


def _report_unexpected(model: nn.Module, found: Match) -> None:
    if found.unexpected:
        more = f" and {len(found.unexpected) - 20} more" if len(found.unexpected) > 20 else ""
        logger.warning(
            "Some weights of the model checkpoint at %s were not used when initializing %s: %s%s.",
            found.location,
            type(model).__name__,
            ", ".join(found.unexpected[:20]),
            more,
        )


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, object] | None = None,
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Fills `model` from a checkpoint: a file, an `*.index.json`, or a folder (see `Checkpoint.open`).

    Args:
        device_map: module name → device. None fills tensors where they are, and on CPU those on meta. What is mapped to "disk" becomes a
            meta tensor, and `offload_folder` gets an `index.json` that points into the checkpoint: nothing of it is copied.
        offload_folder: needed with "disk". It is refused when it belongs to another model.
        dtype: of floating tensors; by default each keeps the model's own.
        offload_state_dict: accepted for old scripts; memory stays flat without it.
        offload_buffers: whether buffers mapped to "disk" stay there; otherwise they come to the CPU.
        keep_in_fp32_modules: with float16, tensors with one of these among the components of their name stay in float32.
        offload_8bit_bnb: accepted for old scripts.
        strict: whether tensors in the checkpoint that the model has no place for are an error; otherwise they are a warning.
        full_state_dict, broadcast_from_rank0: for several processes and `device_map=None`, as in
            `torch.distributed.checkpoint.state_dict.StateDictOptions`.

    Raises:
        MatchError: tensors that nothing fills, other shapes, lost scales; before anything is read. CheckpointError: damaged files.
        PlanError (ValueError): a map that does not cover the model, "disk" without a folder. The model is unchanged after any of them.
    """
    if device_map is None and torch.distributed.is_available() and torch.distributed.is_initialized() and broadcast_from_rank0:
        _load_from_rank0(model, checkpoint, full_state_dict=full_state_dict, strict=strict)
        return
    devices = None if device_map is None else normalized(device_map)
    if devices is not None and (unknown := unknown_entries(model, devices)):
        warnings.warn(f"The following device_map keys do not match any submodules in the model: {unknown}", UserWarning, stacklevel=2)
    if devices is None or "disk" not in devices.values():
        load(model, Checkpoint.open(checkpoint), devices, dtype_of=dtype_rule(dtype, keep_in_fp32_modules), strict=strict)
        return
    if offload_folder is None:
        raise PlanError("At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`.")
    opened = Checkpoint.open(checkpoint)
    source = _address(opened.location)
    check_owner(offload_folder, model, source)
    found = match(model, opened, dtype_of=dtype_rule(dtype, keep_in_fp32_modules))
    found.check(strict=strict)
    index = _offload_index(opened, found, placements(model, found, devices, offload_buffers=offload_buffers))
    with _restorable_folder(Path(offload_folder)):
        write_owner(offload_folder, model, source)
        write_atomically(Path(offload_folder) / OFFLOAD_INDEX_NAME, json.dumps(index, indent=2).encode())
        materialize(model, found, devices, offload_buffers=offload_buffers)
    _report_unexpected(model, found)


def _offload_index(opened: Checkpoint, found: Match, keys: Mapping[str, DeviceKey]) -> dict[str, dict[str, Any]]:
    """An offload index whose entries point into the checkpoint, for all names of the tensors that stay there."""
    index: dict[str, dict[str, Any]] = {}
    source = _address(opened.location)
    for name, transfer in found.transfers.items():
        if keys[name] != "disk":
            continue
        # Without key rules a tensor is filled from one entry, which may be its tie's and may lie in parts of the same name.
        entry = opened.entries[next((part.name for part in transfer.entries()), name)]
        kind = "safetensors_file" if entry.file.suffix == ".safetensors" else "torch_file"
        index[name] = {
            kind: source if isinstance(entry.contents, Sharded) else _address(entry.file),
            "weight_name": entry.name,
            "dtype": str(transfer.dtype).removeprefix("torch."),
            "shape": list(transfer.shape),
        }
    return index | {alias: index[first] for alias, first in found.aliases.items() if first in index}


def _address(file: CheckpointFile | str) -> str:
    """What names a file or folder from everywhere."""
    if isinstance(file, RemoteFile):
        return file.url
    return file if isinstance(file, str) else str(file.resolve())


@contextlib.contextmanager
def _restorable_folder(folder: Path) -> Iterator[None]:
    """Makes the folder; after an error it is gone again, or its index and note are what they were."""
    names = (OFFLOAD_INDEX_NAME, OWNER_NAME)
    with folder_to_write(folder, names):
        before = {folder / name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        try:
            yield
        except BaseException:
            for file, content in before.items():
                write_atomically(file, content)
            raise


def _load_from_rank0(model: nn.Module, checkpoint: str | Path, *, full_state_dict: bool, strict: bool) -> None:
    """Reads on rank 0 alone and lets torch hand the values to the other processes. What goes wrong on rank 0 is raised on all."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # takes seconds to import

    state: dict[str, Any] = {}
    error: BigModelError | None = None
    if torch.distributed.get_rank() == 0:
        try:
            state = _values(model, checkpoint, strict=strict)
        except BigModelError as problem:
            error = problem
    outcome = [None if error is None else str(error)]
    torch.distributed.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[0] is not None:
        raise CheckpointError(f"Rank 0 could not load: {outcome[0]}")
    options = StateDictOptions(full_state_dict=full_state_dict, strict=strict, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def _values(model: nn.Module, checkpoint: str | Path, *, strict: bool) -> dict[str, torch.Tensor]:
    """All values for the state dict of `model`, in host memory, under all of their names."""
    found = match(model, Checkpoint.open(checkpoint))
    found.check(strict=strict)
    _report_unexpected(model, found)
    values = {name: empty_host_tensor(transfer.shape, transfer.dtype) for name, transfer in found.transfers.items()}
    reader = Reader(found.identities)
    try:
        reader.read([(transfer, values[name]) for name, transfer in found.transfers.items()])
    finally:
        reader.close()
    return values | {alias: values[first] for alias, first in found.aliases.items() if first in values}


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | Path) -> None:
    """Brings weights that were written to `offload_folder` back into `model`, on CPU. Nothing happens without an index.

    A weight that stands beside its scales (`<name>.SCB`) gets them.
    """
    for name, info in (index or {}).items():
        if name.endswith(".SCB"):
            continue
        scales = f"{name.rpartition('.')[0]}.SCB"
        statistics = None
        if name.endswith(".weight") and index is not None and scales in index:
            statistics = load_offloaded_weight(Path(offload_folder) / f"{scales}.dat", index[scales])
        value = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", info)
        set_module_tensor_to_device(model, name, "cpu", value=value, fp16_statistics=statistics)
