"""Loading a checkpoint into a model under the name that scripts know: open, match, check, materialize; an index for what stays on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch import nn

from ..atomic import folder_to_write, write_atomically
from ..constants import OFFLOAD_INDEX_NAME
from ..device_map import normalized, unknown_entries
from ..devices import DeviceKey
from ..errors import CheckpointError, PlanError
from ..interrupts import uninterrupted
from ..progress import ProgressCallback
from ..protocols import Packer
from .checkpoint import Checkpoint, check_open
from .dtypes import dtype_rule
from .entry import Sharded
from .exchange import exchange, several_processes
from .extra_state import ExtraStates, set_extra_states
from .folder_owner import OWNER_NAME, check_owner, write_owner
from .host_memory import empty_host_tensor
from .keys import KeyRules
from .load_hooks import call_after, load_hooks
from .location import CheckpointFile, RemoteFile
from .match import DtypeOf, Match, match, some
from .materialize import materialize, placements
from .offload_folder import load_offloaded_weight, offload_weight
from .reader import Reader
from .report import LoadReport
from .set_tensor import set_module_tensor_to_device
from .ways import Reading

__all__ = ["load", "load_checkpoint_in_model", "load_offloaded_weights", "load_together"]

MAP_FINDERS: Final = ("auto", "balanced", "balanced_low_0", "sequential")

logger = logging.getLogger(__name__)


def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: Mapping[str, object] | None = None,
    *,
    rules: KeyRules | None = None,
    dtype_of: DtypeOf | None = None,
    ignore_missing: str | Collection[str] = (),
    ignore_unexpected: str | Collection[str] = (),
    strict: bool = False,
    offload_buffers: bool = False,
    packer: Packer | None = None,
    packed_file: Path | None = None,
    scales: Collection[str] = (),
    mmap: bool = False,
    reading: Reading = "auto",
    makes_plain: bool = False,
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> LoadReport:
    """Everything from an open checkpoint to a filled model; see `match`, `Match.check` and `materialize` for arguments and errors.

    Entries that fill nothing are a warning. No file is written.
    """
    check_open(checkpoint)
    found = match(model, checkpoint, rules, dtype_of=dtype_of, ignore_missing=ignore_missing, ignore_unexpected=ignore_unexpected)
    _report_hooks(found)
    found.check(strict=strict)
    _report_unexpected(model, found)
    return materialize(
        model,
        found,
        device_map,
        offload_buffers=offload_buffers,
        packer=packer,
        packed_file=packed_file,
        scales=scales,
        mmap=mmap,
        reading=reading,
        makes_plain=makes_plain,
        progress=progress,
        progress_callback=progress_callback,
    )


def _report_hooks(found: Match) -> None:
    if found.hooks.problems:
        logger.warning(
            "What these modules do in load_state_dict was left out, and their weights are taken as they are in %s: %s. Where they need it, "
            "call load_state_dict of the module itself with the tensors of the checkpoint.",
            found.location,
            some(found.hooks.problems, "; "),
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
    device_map: Mapping[str, object] | str | int | torch.device | None = None,
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: str | Collection[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    mmap: bool = False,
    reading: Reading = "auto",
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> None:
    """Fills `model` from a checkpoint: a file, an `*.index.json`, or a folder (see `Checkpoint.open`).

    Args:
        device_map: module name → device, or one device for everything. None fills tensors where they are, and on CPU those on meta. What is
            mapped to "disk" becomes a meta tensor, and `offload_folder` gets an `index.json` that points into the checkpoint: nothing of it
            is copied but what is made of several tensors there (weights with their scales), which is written once, as it is wanted.
        offload_folder: needed with "disk". It is refused when it belongs to another model.
        dtype: of floating tensors; by default each keeps the model's own.
        offload_state_dict: accepted for old scripts; memory stays flat without it.
        offload_buffers: whether buffers mapped to "disk" stay there; otherwise they come to the CPU.
        keep_in_fp32_modules: with float16, tensors with one of these among the components of their name stay in float32.
        offload_8bit_bnb: accepted for old scripts.
        strict: whether tensors in the checkpoint that the model has no place for are an error; otherwise they are a warning.
        full_state_dict: accepted for old scripts: of a sharded parameter (DTensor) each process gets its part, whole tensors are whole in
            all.
        broadcast_from_rank0: with `device_map=None` and in a call that all processes make, process 0 alone reads (the others need no
            files) and sends.
            Without it, each reads what its model holds, of sharded parameters no more than its part, but for parts of rows shorter than
            32 KiB (64 KiB where they are cast, any where they go to an accelerator), which it reads with what lies between them. With
            `load_together` all processes read the files once.
        mmap: whether tensors on CPU that need no conversion share the pages of the checkpoint's files instead of being private. Who then
            writes to a file changes the model, and who truncates it ends the process.
        reading: how files are read: through the page cache (`"buffered"`), past it (`"direct"`), or as is found to be faster (`"auto"`).
        progress: shows a bar, on the main process; by default on a terminal.
        progress_callback: called in every process with bytes done and bytes in all.

    Raises:
        MatchError: tensors that nothing fills, other shapes, lost scales; before anything is read. CheckpointError: damaged files.
        PlanError (ValueError): a map that does not cover the model, "disk" without a folder, `mmap` or `reading` where bytes come from
        another process. The model is unchanged after any of them.
    """
    if device_map is None and broadcast_from_rank0 and several_processes():
        if mmap or reading != "auto":
            raise PlanError("mmap= and reading= say how a process reads files; with broadcast_from_rank0 it gets its weights from another.")
        load_together(
            model,
            checkpoint,
            dtype_of=dtype_rule(dtype, keep_in_fp32_modules),
            strict=strict,
            rank0_reads=True,
            progress=progress,
            progress_callback=progress_callback,
        )
        return
    devices = None if device_map is None else _given_map(device_map)
    if devices is not None and (unknown := unknown_entries(model, devices)):
        warnings.warn(f"The following device_map keys do not match any submodules in the model: {unknown}", UserWarning, stacklevel=2)
    if devices is None or "disk" not in devices.values():
        dtype_of = dtype_rule(dtype, keep_in_fp32_modules)
        load(
            model,
            Checkpoint.open(checkpoint),
            devices,
            dtype_of=dtype_of,
            strict=strict,
            mmap=mmap,
            reading=reading,
            progress=progress,
            progress_callback=progress_callback,
        )
        return
    if offload_folder is None:
        raise PlanError("At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`.")
    opened = Checkpoint.open(checkpoint)
    source = _address(opened.location)
    check_owner(offload_folder, model, source)
    found = match(model, opened, dtype_of=dtype_rule(dtype, keep_in_fp32_modules))
    _report_hooks(found)
    found.check(strict=strict)
    keys = placements(model, found, devices, offload_buffers=offload_buffers)
    every = {name: [name, *(alias for alias, first in found.aliases.items() if first == name)] for name in found.transfers}
    made = {name: names for name, names in every.items() if keys[name] == "disk" and _is_made(names, opened, found)}
    index = _offload_index(opened, found, keys, made)
    with _restorable_folder(Path(offload_folder), [f"{name}.dat" for names in made.values() for name in names]):
        write_owner(offload_folder, model, source)
        _write_made(found, made, Path(offload_folder))
        write_atomically(Path(offload_folder) / OFFLOAD_INDEX_NAME, json.dumps(index, indent=2).encode())
        materialize(
            model,
            found,
            devices,
            offload_buffers=offload_buffers,
            mmap=mmap,
            reading=reading,
            progress=progress,
            progress_callback=progress_callback,
        )
    _report_unexpected(model, found)


def _given_map(device_map: Mapping[str, object] | str | int | torch.device) -> dict[str, DeviceKey]:
    if isinstance(device_map, str) and device_map in MAP_FINDERS:
        raise PlanError(
            f"device_map={device_map!r}: this call finds no map. load_checkpoint_and_dispatch does; or give a map that "
            "infer_auto_device_map has found, or one device."
        )
    return normalized({"": device_map} if isinstance(device_map, (str, int, torch.device)) else device_map)


def _is_made(names: Collection[str], opened: Checkpoint, found: Match) -> bool:
    """Whether the tensor of these names is no entry of the checkpoint but made of some, so that no index can point at it."""
    if not found.hooks.computed.isdisjoint(names):
        return True
    entry = next((each for each in (found.hooks.entry_of.get(name, name) for name in names) if each in found.available), None)
    return entry is not None and opened.entries.get(entry) is not found.available[entry]


def _write_made(found: Match, made: Mapping[str, Collection[str]], folder: Path) -> None:
    """Writes tensors as they are wanted, one at a time, as raw files of an offload folder under each of their names."""
    reader = Reader(found.identities)
    try:
        for first, names in made.items():
            transfer = found.transfers[first]
            value = empty_host_tensor(transfer.shape, transfer.dtype)
            reader.read([(transfer, value)])
            for name in names:
                offload_weight(value, name, folder)
    finally:
        reader.close()


def _offload_index(opened: Checkpoint, found: Match, keys: Mapping[str, DeviceKey], made: Collection[str]) -> dict[str, dict[str, Any]]:
    """An offload index whose entries point into the checkpoint, or name raw files (`made`), for all names of the tensors on disk."""
    index: dict[str, dict[str, Any]] = {}
    source = _address(opened.location)
    for name, transfer in found.transfers.items():
        if keys[name] != "disk":
            continue
        index[name] = {"dtype": str(transfer.dtype).removeprefix("torch."), "shape": list(transfer.shape)}
        if name in made:
            continue
        # Without key rules a tensor is filled from one entry, which may be its tie's and may lie in parts of the same name.
        entry = opened.entries[next((part.name for part in transfer.entries()), found.hooks.entry_of.get(name, name))]
        kind = "safetensors_file" if opened.format == "safetensors" else "torch_file"
        index[name] |= {kind: source if isinstance(entry.contents, Sharded) else _address(entry.file), "weight_name": entry.name}
    return index | {alias: index[first] for alias, first in found.aliases.items() if first in index}


def _address(file: CheckpointFile | str) -> str:
    """What names a file or folder from everywhere."""
    if isinstance(file, RemoteFile):
        return file.url
    return file if isinstance(file, str) else str(file.resolve())


@contextlib.contextmanager
def _restorable_folder(folder: Path, written: Collection[str]) -> Iterator[None]:
    """Makes the folder; after an error it is gone again, or its index and note are what they were, and new files `written` are gone."""
    names = (OFFLOAD_INDEX_NAME, OWNER_NAME)
    with folder_to_write(folder, (*names, *written)):
        before = {folder / name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        try:
            yield
        except BaseException:
            with uninterrupted():
                for file, content in before.items():
                    write_atomically(file, content)
            raise


def load_together(
    model: nn.Module,
    checkpoint: str | Path,
    *,
    rules: KeyRules | None = None,
    dtype_of: DtypeOf | None = None,
    strict: bool = False,
    rank0_reads: bool = False,
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> None:
    """Loads the same checkpoint into the same model in all processes of the default group, in a call that all of them make.

    Each of the N processes reads 1/N of the bytes and sends them to the others; with `rank0_reads`, process 0 reads everything, and the
    others need no files. Whole tensors are whole in all processes; of a DTensor (FSDP2, tensor parallelism) each gets its part. Beside
    what stays, a process holds a few MiB. Rules, dtypes, `strict` and progress as in `load`; the callback is called in every process.

    Raises the errors of `load`, and those of the caller's rules, in the process where they happen and `CheckpointError`, naming it, in all
    others; `MatchError` in all of them where their models have other tensors, or they read other ones. No model has changed then.
    """
    found: Match | None = None
    error: Exception | None = None
    if not rank0_reads or torch.distributed.get_rank() == 0:
        try:
            found = match(model, Checkpoint.open(checkpoint), rules, dtype_of=dtype_of)
            _report_hooks(found)
            found.check(strict=strict)
            _report_unexpected(model, found)
        except Exception as problem:  # of any kind (rules are the caller's code): the others must not wait for this process
            error = problem
    exchange(model, found, error, rank0_reads=rank0_reads, progress=progress, progress_callback=progress_callback)
    _set_extra_states_together(model, found, rank0_reads=rank0_reads)
    if found is not None:
        call_after(model, found.hooks.after, found.without_entry, found.unexpected)
    elif rules is None:
        call_after(model, load_hooks(model).after, (), ())


def _set_extra_states_together(model: nn.Module, found: Match | None, *, rank0_reads: bool) -> None:
    """Gives all processes the extra states of modules, which process 0 reads for the others or each for itself."""
    values: dict[str, Any] = {}
    problem: Exception | None = None
    if found is not None:
        try:
            values = _read_extra_states(found)
        except Exception as error:  # whatever it is, the others must not wait for this process
            problem = error
    if rank0_reads:
        told = [(values, None if problem is None else str(problem))]
        torch.distributed.broadcast_object_list(told, src=0)
        values, story = told[0]
        if story is not None and problem is None:
            raise CheckpointError(f"Process 0 could not read extra states: {story}")
    if problem is not None:
        raise problem
    set_extra_states(model, values)


def _read_extra_states(found: Match) -> dict[str, Any]:
    extra = ExtraStates.to_read(found.extra_states)
    reader = Reader(found.identities)
    try:
        reader.read(extra.jobs)
    finally:
        reader.close()
    return extra.values()


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
