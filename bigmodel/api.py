"""The order of things: plan, match, read, dispatch. Every room is called from here, and none of them calls another.

Start reading at `load_and_dispatch`; the other functions are ways into it, or into one of its steps, under the names that scripts know.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .device_map import normalized
from .devices import as_device
from .dispatch import (
    LazyTensor,
    UserCpuOffloadHook,
    as_store,
    attach_cpu_offload_hook,
    attach_layerwise_casting_hooks,
    dispatch,
    dispatched,
    refuse_contradictions,
    show_device_map,
    values_of,
)
from .errors import DispatchError
from .loading import (
    Checkpoint,
    DtypeOf,
    KeyRules,
    NoValuesError,
    Reading,
    check_open,
    dtype_rule,
    init_empty_weights,
    init_on_device,
    load,
    load_checkpoint_in_model,
)
from .loading import save_model as write_model
from .modules import named_module_tensors
from .placing import DeviceMap, Placing, find_placing, main_device_of, refuse_absent
from .planning import check_device_map, convert_file_size_to_int, infer_auto_device_map
from .progress import ProgressCallback
from .protocols import Store
from .quantization import packed_layers
from .quantizing import quantized_load, warn_of_silent_config
from .resting import folder_store, own_tensors, store_for
from .unchanged import unchanged_on_error

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_dispatch",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "save_model",
]

logger = logging.getLogger("bigmodel.big_modeling")  # the name that scripts know this module by


def load_and_dispatch(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    device_map: DeviceMap | Placing | None = "auto",
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: torch.dtype | str | None = None,
    rules: KeyRules | None = None,
    dtype_of: DtypeOf | None = None,
    ignore_missing: str | Collection[str] = (),
    ignore_unexpected: str | Collection[str] = (),
    strict: bool = False,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    force_hooks: bool = False,
    quantization: Any = None,
    packed_cache: bool | str | Path | None = None,
    mmap: bool = False,
    reading: Reading = "auto",
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> nn.Module:
    """Fills `model` (usually on meta) from `checkpoint` and makes it run wherever its weights rest. The whole job, in four steps.

    Args:
        device_map: a map, one device for everything, or how to find one (`"auto"`, `"balanced"`, `"balanced_low_0"`, `"sequential"`).
            None loads to CPU and attaches nothing. A `Placing` is a map that was checked before.
        max_memory: budget of each device in bytes or as "2GiB"; measured where it is not given.
        no_split_module_classes: names of the classes that are never cut in two; found in the model without it.
        dtype: converts floating tensors on the way; by default each keeps the dtype that the model has it in.
        rules: how names of the model are made from names in the checkpoint.
        dtype_of: decides the dtype of each tensor, instead of `dtype`.
        ignore_missing: regular expressions for names of the model that may stay unfilled.
        ignore_unexpected: regular expressions for names of the checkpoint that are passed over without a word.
        strict: whether tensors of the checkpoint that the model has no place for are an error, not a warning.
        offload_buffers: whether buffers of offloaded modules are offloaded as well.
        skip_keys: names of arguments of `forward` that stay where they are.
        preload_module_classes: classes whose whole tree is brought when they run, because they use their children's weights themselves.
        force_hooks: attaches hooks even when nothing moves.
        quantization: a `BnbQuantizationConfig` (or transformers' `BitsAndBytesConfig`), or a packed format or its name (`"nf4"`, `"fp8"`):
            linear layers are packed as their weights arrive. A checkpoint that holds packed weights is loaded as it is, with a config or
            without.
        packed_cache: a folder for packed weights (True: beside the checkpoint), from which the next load with the same config reads them.
        mmap: whether weights on CPU that need no conversion share the pages of the checkpoint's files, with the file cache and with other
            processes, instead of being private. Who then writes to a file changes the model, and who truncates it ends the process.
        reading: how files are read: through the page cache (`"buffered"`), past it (`"direct"`), or as is found to be faster (`"auto"`).
        progress: shows a bar; by default on a terminal.
        progress_callback: called with bytes done and bytes in all, whether or not there is a bar.

    Raises:
        PlanError: the map or the budgets cannot work. MatchError: names or shapes do not fit. CheckpointError: a file is damaged.
        QuantizationError: a config that is none, or packed weights that do not fit it. The model is unchanged after any of them, and after
        Ctrl-C.
    """
    check_open(checkpoint)
    with (
        unchanged_on_error(model),
        quantized_load(
            model, checkpoint, quantization, rules=rules, dtype=dtype, dtype_of=dtype_of, packed_cache=packed_cache
        ) as quantized,
    ):
        if device_map is None:
            if quantized.scheme is not None and dispatched(model) is not None:
                raise DispatchError(
                    "The model is dispatched, and its layers give way to packed ones: pass a device_map, by which it is dispatched anew, "
                    "or bigmodel.undispatch(model) first."
                )
            place = None
        else:
            place = find_placing(
                model,
                device_map,
                max_memory=max_memory,
                no_split_module_classes=no_split_module_classes,
                dtype=dtype,
                dtype_of=quantized.dtype_of,
                offload_buffers=offload_buffers,
                weight_format=quantized.weight_format,
            )
            refuse_contradictions(model, place.device_map, place.main_device, place.offload_buffers)
        report = load(
            model,
            checkpoint,
            None if place is None else place.device_map,
            rules=quantized.rules,
            dtype_of=quantized.dtype_of or dtype_rule(dtype),
            ignore_missing=ignore_missing,
            ignore_unexpected=ignore_unexpected,
            strict=strict,
            offload_buffers=place is not None and place.offload_buffers,
            packer=quantized.packer,
            packed_file=quantized.packed_file,
            scales=quantized.scales,
            mmap=mmap,
            reading=reading,
            makes_plain=place is not None and dispatched(model) is not None,
            progress=progress,
            progress_callback=progress_callback,
        )
        quantized.install(model, report)
        if place is not None:
            _dispatch_or_move(
                model,
                place,
                store=report.store,
                skip_keys=skip_keys,
                preload_module_classes=preload_module_classes,
                no_split_module_classes=no_split_module_classes,
                force_hooks=force_hooks,
            )
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: DeviceMap | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    quantization: Any = None,
    packed_cache: bool | str | Path | None = None,
    mmap: bool = False,
    reading: Reading = "auto",
    progress: bool | None = None,
    progress_callback: ProgressCallback | None = None,
) -> nn.Module:
    """Loads a checkpoint (file, folder or index) into `model` and attaches what makes it run under `device_map`.

    `device_map`, `max_memory`, `no_split_module_classes`, `offload_buffers`, `dtype`, `skip_keys`, `preload_module_classes`,
    `force_hooks`, `strict`, `quantization`, `packed_cache`, `mmap`, `reading`, `progress` and `progress_callback` are as in
    `load_and_dispatch`. `offload_folder` and `offload_state_dict` are accepted for old scripts and need not be given: offloaded weights
    are read from the checkpoint itself, so nothing is written, and nothing is spooled. `full_state_dict` and `broadcast_from_rank0` apply
    where `device_map` is None, see `load_checkpoint_in_model`.

    Returns the same model. Raises ValueError for an unknown strategy, and the errors of `load_and_dispatch`.
    """
    if device_map is None and quantization is None:
        load_checkpoint_in_model(
            model,
            checkpoint,
            dtype=dtype,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
            mmap=mmap,
            reading=reading,
            progress=progress,
            progress_callback=progress_callback,
        )
        return model
    load_and_dispatch(
        model,
        Checkpoint.open(checkpoint),
        device_map=device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        strict=strict,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        quantization=quantization,
        packed_cache=packed_cache,
        mmap=mmap,
        reading=reading,
        progress=progress,
        progress_callback=progress_callback,
    )
    if isinstance(device_map, Mapping):
        show_device_map(model, device_map)  # as the caller wrote it
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: int | str | torch.device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Makes a loaded model run under `device_map`: what is mapped to "cpu" or "disk" is brought to `main_device` when it is needed.

    Args:
        device_map: covers every parameter and persistent buffer, else ValueError.
        main_device: where offloaded modules run; by default the first accelerator of the map, or "cpu".
        state_dict: values of the offloaded weights, on CPU; by default the model's own.
        offload_dir: folder of the weights mapped to "disk". Those that the model holds are written there first, unless they are there; a
            folder of another model is refused.
        offload_index: that folder's index, when it is not in the folder.
        offload_buffers, skip_keys, preload_module_classes, force_hooks: as in `load_and_dispatch`.

    Returns the same model, with `hf_device_map` set. Raises ValueError when "disk" is in the map and nothing says where these weights rest.
    """
    check_device_map(model, dict(device_map))
    devices = normalized(device_map)
    refuse_absent(devices)
    main = as_device(main_device) if main_device is not None else main_device_of(devices)
    store = store_for(model, devices, state_dict, offload_dir, offload_index)
    _dispatch_or_move(
        model,
        Placing(devices, main, offload_buffers),
        store=store,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        no_split_module_classes=None,
        force_hooks=force_hooks,
    )
    tiers = [tier for tier in ("cpu", "disk") if tier in devices.values() and main.type != tier]
    if tiers and dispatched(model) is not None:
        logger.warning("Some parameters are on the meta device because they were offloaded to the %s.", " and ".join(tiers))
    show_device_map(model, device_map)  # as the caller wrote it
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
) -> nn.Module:
    """Lets every weight of `model` rest in RAM and come to `execution_device` (by default the first parameter's) when it is needed."""
    device = as_device(execution_device) if execution_device is not None else _execution_device(model)
    if state_dict is None:
        away = [
            (name, value)
            for name, value in own_tensors(model).items()
            if not (isinstance(value, LazyTensor) and value.origin.store.kind == "cpu")
        ]
        state_dict = {name: value.to("cpu") for name, value in away}
    return _offload_everything(model, device, as_store(state_dict), offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: str | Collection[str] | None = None,
) -> nn.Module:
    """Lets every weight of `model` rest in `offload_dir` and come to `execution_device` (that of the first parameter) when it is needed.

    The weights are written there first; those of a model that is on meta must be there already. A folder of another model is refused.
    """
    device = as_device(execution_device) if execution_device is not None else _execution_device(model)
    names = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    store = folder_store(model, names, offload_dir)
    return _offload_everything(model, device, store, offload_buffers, preload_module_classes)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keeps `model` on CPU until it runs, then moves all of it to `execution_device` and leaves it there, until `hook.offload()`.

    With `prev_module_hook`, running this model first sends that one's back to CPU: for pipelines of models that run one after the other.
    """
    return attach_cpu_offload_hook(model, execution_device, prev_module_hook)


def save_model(
    model: nn.Module,
    folder: str | Path,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes the state dict of any model, offloaded or not, to `folder`, with one tensor in memory at a time. Returns the files.

    `max_shard_size` is in bytes or as "5GB". Ties are saved once. Packed weights are saved packed, with checksums by which loading sees
    damage; a `config.json` in `folder` that does not say that they are packed is warned about. Files appear together when all are complete;
    see `loading.save_model`. Raises what that raises, among others for tensors on meta that rest nowhere.
    """
    state = model.state_dict(keep_vars=True)
    empty = [name for name, value in state.items() if torch.is_tensor(value) and not isinstance(value, LazyTensor) and value.is_meta]
    if empty:
        raise NoValuesError(empty)
    files = write_model(
        model,
        folder,
        convert_file_size_to_int(max_shard_size),
        safe_serialization,
        metadata,
        fetch=lambda name: values_of(state[name]),
        checksums=bool(packed_layers(model)),
    )
    warn_of_silent_config(model, Path(folder))
    return files


def _dispatch_or_move(
    model: nn.Module,
    place: Placing,
    *,
    store: Store | None,
    skip_keys: str | Collection[str] | None,
    preload_module_classes: str | Collection[str] | None,
    no_split_module_classes: str | Collection[str] | None,
    force_hooks: bool,
) -> nn.Module:
    different = set(place.device_map.values())
    if len(different) == 1 and "disk" not in different and not force_hooks and dispatched(model) is None:
        model.to(as_device(next(iter(different))))  # one device: nothing moves, so nothing is attached
    else:
        dispatch(
            model,
            place.device_map,
            main_device=place.main_device,
            store=store,
            offload_buffers=place.offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            no_split_module_classes=no_split_module_classes,
            force_hooks=force_hooks,
            ring_bytes=place.ring_bytes,
        )
    show_device_map(model, place.device_map)
    return model


def _offload_everything(
    model: nn.Module, device: torch.device, store: Store, offload_buffers: bool, preload_module_classes: str | Collection[str] | None
) -> nn.Module:
    return dispatch(
        model,
        {"": "disk"},  # "not resident": the store says where the bytes really rest
        main_device=device,
        store=store,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def _execution_device(model: nn.Module) -> torch.device:
    """The device of the first parameter that is somewhere; the CPU for a model that is nowhere yet."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
