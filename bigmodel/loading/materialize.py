"""Fills a model from what was matched: resident tensors on their devices, the rest left in the checkpoint. All or nothing."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ..device_map import covering_entry, normalized
from ..devices import DeviceKey, as_device, as_key, computing_key
from ..errors import MatchError, PlanError
from ..modules import get_non_persistent_buffers, owner_of
from ..progress import Progress, ProgressCallback
from ..protocols import Offloaded, Packer, TensorSpec
from ..text import bytes_text
from .checksum import check_tensors, not_compared
from .exchange import several_processes
from .extra_state import ExtraStates, set_extra_states
from .finite import refuse_not_finite
from .host_memory import empty_tensors
from .load_hooks import call_after
from .location import RemoteFile
from .mapped import mapped_tensors
from .match import Match
from .packed import PackedWeights, bring_packed, kept_packed
from .reader import Reader
from .replace import Replacement
from .report import KeptWeight, LoadReport
from .sharded import filled_like, is_sharded, local_device, local_transfer
from .store import CheckpointStore
from .transfer import Transfer
from .verify import verify_entries
from .ways import READINGS, Reading

__all__ = ["check_covering", "materialize", "placements"]

logger = logging.getLogger(__name__)


def check_covering(model: nn.Module, device_map: Mapping[str, object]) -> None:
    """Raises `PlanError` for a tensor of the state dict without a device.

    Entries that name nothing of the model are passed over: whoever takes the map from the caller warns of them, once.
    """
    transient = get_non_persistent_buffers(model, recurse=True, fqns=True)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in transient]
    bare = [name for name in names if covering_entry(name, device_map) is None]
    if bare:
        more = f" and {len(bare) - 10} more" if len(bare) > 10 else ""
        raise PlanError(f"{', '.join(bare[:10])}{more} doesn't have any device set. Add an entry to the device map; '' covers all.")


def placements(
    model: nn.Module, match: Match, device_map: Mapping[str, object] | None, *, offload_buffers: bool = False
) -> dict[str, DeviceKey]:
    """Where `materialize` puts each matched tensor: an accelerator's index, `"cpu"` or `"cpu:resident"`, or `"disk"` for what stays in
    the checkpoint.

    Raises `PlanError` for a map that does not cover the model.
    """
    devices = None if device_map is None else normalized(device_map)
    if devices is not None:
        check_covering(model, devices)
    tensors = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    return {name: _device_of(tensors[name], every, devices, offload_buffers) for name, every in _names(match).items()}


def materialize(
    model: nn.Module,
    match: Match,
    device_map: Mapping[str, object] | None = None,
    *,
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
    """Gives every matched tensor its values, where the map says; without a map where it is, and on CPU if that is the meta device.

    Tensors for `"disk"` become meta tensors of their final dtype, and `LoadReport.store` reads them; buffers among them only with
    `offload_buffers`, otherwise they come to the CPU. Ties stay one object. Memory: what stays, plus at most `constants.RING_BYTES`.

    The weights that `packer` takes are not put into the model: what is kept of them is in `LoadReport.packed`. It is read from
    `packed_file`, if an earlier load has kept it there, and else kept there; without one, only what rests on disk is written, to a private
    file.

    `scales` names tensors of the model that are scales of packed weights, which are taken as they are: those that come into memory have to
    be finite.

    What is offloaded already stays so, and rests where the map says: in RAM for all that is not "disk", and in the checkpoint for that.
    Without a map, what rested on disk is left in the checkpoint. With `makes_plain` it becomes like all others, for who dispatches the
    model anew.

    With `mmap`, tensors on CPU whose bytes lie in a file as they are wanted share its pages (see `mapped_tensors`); otherwise they are
    private, and a file that changes later changes nothing. `reading` is how files are read, see `Reading`.

    On any error, Ctrl-C included, the model is what it was. Raises `PlanError`, `MatchError` for tensors that nothing fills and that a map
    sends somewhere although they are on meta, and `CheckpointError` when a file has changed since it was opened, holds other bytes than
    were written to it (`checksum`), or scales that are NaN or infinite.
    """
    started = time.perf_counter()
    if reading not in READINGS:
        raise PlanError(f"reading={reading!r} is no way of reading files. Use one of {', '.join(map(repr, READINGS))}.")
    if device_map is not None:
        _refuse_nothing(model, match.ignored)
    names = _names(match)
    keys = placements(model, match, device_map, offload_buffers=offload_buffers)
    if not makes_plain:
        keys |= _where_offloaded_rest(model, keys, device_map)
    sharded = {name: tensor for name in match.transfers if is_sharded(tensor := _tensor(model, name))}
    if sharded and (device_map is not None or packer is not None):
        raise PlanError(
            f"{next(iter(sharded))!r} and {len(sharded) - 1} more are sharded over processes, which says where they are: load them without "
            "a device map and without quantization."
        )
    keys |= {name: as_key(local_device(tensor)) for name, tensor in sharded.items()}
    if "meta" in keys.values():
        raise PlanError("The device map sends weights to 'meta', where nothing can rest. Use 'disk' for those that shall not be in memory.")
    targets: dict[DeviceKey, torch.device] = {key: as_device(key) for key in set(keys.values()) if key != "disk"}
    device_bytes: defaultdict[DeviceKey, int] = defaultdict(int)
    resident: list[Transfer] = []
    on_disk: dict[str, Transfer] = {}
    weights: dict[str, Transfer] = {}
    for name, whole in match.transfers.items():
        transfer = local_transfer(whole, sharded[name]) if name in sharded else whole
        taken = None if packer is None else next((each for each in names[name] if packer.takes(each)), None)
        if packer is not None and taken is not None:
            transfer = transfer.transposed() if packer.transposed(taken) else transfer
            weights[name] = transfer
            kept = packer.kept(name, _spec(transfer))
            device_bytes[keys[name]] += sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in kept.values())
            continue
        device_bytes[keys[name]] += transfer.nbytes
        if keys[name] == "disk":
            on_disk[name] = transfer
        else:
            resident.append(transfer)
    mappable = [each for each in resident if computing_key(keys[each.target]) == "cpu" and each.target not in sharded]
    mapped = mapped_tensors(mappable, match.identities) if mmap else {}
    read = [transfer for transfer in resident if transfer.target not in mapped]
    jobs: list[tuple[Transfer, torch.Tensor]] = []
    for key, device in targets.items():
        own = [transfer for transfer in read if keys[transfer.target] == key]
        jobs += zip(own, empty_tensors([_spec(transfer) for transfer in own], device), strict=True)
    # Processes that read the same bytes share them in the page cache.
    reader = Reader(match.identities, "buffered" if reading == "auto" and several_processes() else reading)
    kept_before = None if packer is None else kept_packed(packed_file, weights, packer)
    packed = PackedWeights()
    extra = ExtraStates.to_read(match.extra_states)
    total = sum(
        transfer.bytes_to_read
        for transfer in [*read, *(each for each, _ in extra.jobs), *(weights.values() if kept_before is None else ())]
    )
    if kept_before is not None:
        total += sum(entry.nbytes for entry in kept_before.entries.values())
    try:
        with Progress(total, "Loading", show=progress, callback=progress_callback) as bar:
            bytes_read = reader.read([*jobs, *extra.jobs], bar, fresh=True)
            check_tensors(jobs, match.checksums)
            _check_scales([*jobs, *((each, mapped[each.target]) for each in resident if each.target in mapped)], scales)
            converted = [*read, *(weights.values() if kept_before is None else ())]
            verify_entries(not_compared((each for each in converted if each.target not in sharded), match.checksums))
            if packer is not None and weights:
                places = {name: targets.get(keys[name]) for name in weights}
                packed = bring_packed(reader, weights, places, packer, packed_file, kept_before, bar)
        store = _store(match, on_disk, packed)
        with Replacement(model, makes_plain=makes_plain) as replacement:
            for transfer, tensor in jobs:
                before = sharded.get(transfer.target)
                if before is None:
                    replacement.put(names[transfer.target], tensor)
                elif before.is_meta or before.dtype != tensor.dtype:
                    replacement.put_object(names[transfer.target], filled_like(before, tensor))
            for transfer, tensor in jobs:
                before = sharded.get(transfer.target)
                if before is not None and not before.is_meta and before.dtype == tensor.dtype:
                    with torch.no_grad():
                        before.to_local().copy_(tensor)  # type: ignore[attr-defined]  # its owner (FSDP2) holds on to this very memory
            for name, tensor in mapped.items():
                replacement.put(names[name], tensor)
            for name, transfer in on_disk.items():
                assert store is not None
                replacement.put_at_rest(names[name], _spec(transfer), store, name)
            set_extra_states(model, extra.values())
            call_after(model, match.hooks.after, match.without_entry, match.unexpected, weights)
    finally:
        reader.close()
    return LoadReport(
        bytes_read=bytes_read + packed.bytes_read,
        mapped_bytes=sum(tensor.nbytes for tensor in mapped.values()),
        seconds=time.perf_counter() - started,
        device_bytes=dict(device_bytes),
        missing=match.missing + match.ignored,
        kept=match.kept,
        unexpected=match.unexpected,
        store=store,
        packed={name: KeptWeight(_spec(weights[name]), tensors) for name, tensors in packed.tensors.items()},
    )


def _where_offloaded_rest(model: nn.Module, keys: Mapping[str, DeviceKey], device_map: Mapping[str, object] | None) -> dict[str, DeviceKey]:
    """The keys of tensors that are offloaded already: they rest, if not on disk, in RAM."""
    found: dict[str, DeviceKey] = {}
    for name, key in keys.items():
        tensor = _tensor(model, name)
        if isinstance(tensor, Offloaded):
            found[name] = "disk" if (tensor.rests() if device_map is None else key) == "disk" else "cpu"
    return found


def _check_scales(read: Iterable[tuple[Transfer, torch.Tensor]], scales: Collection[str]) -> None:
    """Raises `CheckpointError` for those of the tensors `scales` that are not finite."""
    for transfer, tensor in read if scales else ():
        if transfer.target in scales and tensor.dtype.is_floating_point:
            first, *others = transfer.entries()
            refuse_not_finite(tensor, transfer.target if others else first.name, first.file)


def _refuse_nothing(model: nn.Module, unfilled: Sequence[str]) -> None:
    """Raises `MatchError` for tensors that the map sends somewhere although they have no values and get none."""
    empty = [name for name in unfilled if (tensor := _tensor(model, name)).is_meta and not isinstance(tensor, Offloaded)]
    if empty:
        more = f" and {len(empty) - 10} more" if len(empty) > 10 else ""
        raise MatchError(
            f"Nothing fills {', '.join(empty[:10])}{more}. ignore_missing allows that, but they are on meta: there are no values to run "
            "with. Build their modules outside of init_empty_weights, or load without a device map, fill them, and dispatch then."
        )


def _names(match: Match) -> dict[str, list[str]]:
    names = {name: [name] for name in match.transfers}
    for alias, first in match.aliases.items():
        if first in names:
            names[first].append(alias)
    return names


def _device_of(tensor: torch.Tensor, names: list[str], devices: Mapping[str, DeviceKey] | None, offload_buffers: bool) -> DeviceKey:
    """Where a tensor goes: for a tied one, the fastest of its names' devices, so that no tie is pulled apart."""
    if devices is None:
        return "cpu" if tensor.device.type == "meta" else as_key(tensor.device)
    entries = [covering_entry(name, devices) for name in names]
    keys = [devices[entry] for entry in entries if entry is not None]
    key = min(keys, key=lambda key: (key == "disk", key == "cpu"))
    return key if key != "disk" or offload_buffers or isinstance(tensor, nn.Parameter) else "cpu"


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    module, attribute = owner_of(model, name)
    return getattr(module, attribute)


def _spec(transfer: Transfer) -> TensorSpec:
    return TensorSpec(transfer.shape, transfer.dtype)


def _store(match: Match, on_disk: Mapping[str, Transfer], packed: PackedWeights) -> CheckpointStore | None:
    if not on_disk and not packed.on_disk:
        return None
    distant = sum(transfer.nbytes for transfer in on_disk.values() if any(isinstance(each.file, RemoteFile) for each in transfer.entries()))
    if distant:
        logger.warning(
            "%s of the weights stay at %s and are fetched over the network whenever they are used. Download the checkpoint first for a "
            "model that runs at the pace of a disk.",
            bytes_text(distant),
            match.location,
        )
    return CheckpointStore({**on_disk, **packed.on_disk}, {**match.identities, **packed.identities}, packed.folder)
