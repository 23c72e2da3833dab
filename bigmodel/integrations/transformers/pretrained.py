"""`bigmodel.from_pretrained`: a transformers model of the hub or of a folder, running wherever its weights fit."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...api import load_and_dispatch
from ...device_map import device_for, unknown_entries
from ...errors import MatchError, PlanError, QuantizationError
from ...loading import Checkpoint, Reading, match
from ...modules import tensor_aliases
from ...placing import DeviceMap, Placing, find_placing
from ...quantization import note_key_rules, packed_layers, scheme_of, transformers_config
from .empty import build_empty, load_config, misfit, resolve_dtype
from .finish import finish
from .hub import resolve
from .initialize import initialize_missing
from .keys import TransformersKeys
from .package import transformers_module
from .quantized import own_quantization
from .ties import untie_different

__all__ = ["from_pretrained"]

logger = logging.getLogger(__name__)


def from_pretrained(
    path_or_id: str | os.PathLike[str],
    *,
    device_map: DeviceMap | None = "auto",
    max_memory: Mapping[Any, int | str] | None = None,
    dtype: torch.dtype | str | None = None,
    model_class: Any = None,
    no_split_module_classes: str | Collection[str] | None = None,
    offload_buffers: bool = False,
    allow_new_weights: bool = False,
    strict: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    quantization: Any = None,
    packed_cache: bool | str | os.PathLike[str] | None = None,
    mmap: bool = False,
    reading: Reading = "auto",
    progress: bool | None = None,
    torch_dtype: torch.dtype | str | None = None,
    quantization_config: Any = None,
) -> Any:
    """Loads a transformers model so that it runs although it may not fit on one device, or in memory at all.

    The model is built without weights, every tensor is paired with what fills it in the checkpoint (transformers' own conversions
    included), a place is found for each, and it is read there; what goes to disk is not read at all. `generate`, pipelines and
    `save_pretrained` work on the result.

    Args:
        path_or_id: a folder with `config.json` and weights, a GGUF file (or a folder with one alone), or the id of a model on the
            Hugging Face hub (`owner/name`; one with a single GGUF file as well, otherwise `hf://owner/name/file.gguf` names it).
        device_map: a map of module names to devices, one device for all, or how to find a map (`"auto"`, `"balanced"`,
            `"balanced_low_0"`, `"sequential"`); None loads to CPU.
        max_memory: what each device may hold (`{0: "10GiB", "cpu": "30GiB"}`); measured where it is not given.
        dtype: of the floating weights; by default (and with `"auto"`) that of the configuration, or of the checkpoint. Weights that the
            model's class keeps in float32 stay so.
        model_class: a model class of transformers, an `Auto…` class, or the name of either; by default the configuration's architecture.
        no_split_module_classes: names of classes that are never split across devices; by default the model's own.
        offload_buffers: whether buffers are offloaded together with the weights of their module.
        allow_new_weights: whether weights that the checkpoint lacks (a new classification head) are initialized as transformers does,
            with a warning, instead of being an error.
        strict: whether tensors of the checkpoint that the model has no use for are an error instead of a warning.
        key_mapping: further renamings of the checkpoint's names, regular expression → replacement.
        attn_implementation: as in transformers (`"eager"`, `"sdpa"`, …).
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
        local_files_only: whether to use nothing but what is in the hub's cache.
        quantization: a `BnbQuantizationConfig`, transformers' `BitsAndBytesConfig`, or a packed format or its name (`"nf4"`, `"fp8"`):
            linear layers are packed as they are read. A checkpoint that is packed already (by bitsandbytes) says so itself.
        packed_cache: a folder for packed weights (True: beside the checkpoint), from which the next load with the same config reads them.
        mmap: whether weights on CPU that need no conversion share the pages of the checkpoint's files, with the file cache and with other
            processes, instead of being private. Who then writes to a file changes the model, and who truncates it ends the process.
        reading: how files are read: through the page cache (`"buffered"`), past it (`"direct"`), or as is found to be faster (`"auto"`).
        progress: shows a progress bar; by default on a terminal.
        torch_dtype: another name of `dtype`, which older scripts use.
        quantization_config: another name of `quantization`, which scripts for transformers use.

    Returns:
        The model (a `PreTrainedModel`), in evaluation mode, with `hf_device_map` set.

    Raises:
        MissingPackageError: transformers is not installed. CheckpointNotFoundError: no such folder, model or weights. CheckpointError: a
        damaged file, a class that is unknown or does not fit, a checkpoint that was quantized in another way than by bitsandbytes, to
        8-bit floats or as gpt-oss is (the latter two are loaded as the floats that they stand for). MatchError: weights are missing, do
        not have the model's shape, or need scales; the message names them. PlanError: the device map or the budgets cannot work.
        QuantizationError: a config that is none, or not that of a checkpoint that is packed.
    """
    transformers_module()
    dtype = _one_dtype(dtype, torch_dtype)
    if quantization is not None and quantization_config is not None:
        raise QuantizationError("quantization and quantization_config are two names of one argument: give one of them.")
    quantization = quantization_config if quantization is None else quantization
    folder = resolve(path_or_id, revision=revision, local_files_only=local_files_only, trust_remote_code=trust_remote_code)
    overrides = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if not (Path(folder) / "config.json").exists():
        Checkpoint.open(folder)  # says what is wrong with a GGUF file in better words than code that looks for a configuration in it
    config = load_config(folder, trust_remote_code=trust_remote_code, **overrides)
    own = own_quantization(path_or_id, config)
    quantization = quantization or own
    scheme = None if quantization is None else scheme_of(quantization)
    if scheme is not None:
        dtype, scheme = dtype or scheme.dtype, replace(scheme, dtype=None)  # the model is built in it
    checkpoint = Checkpoint.open(folder)

    found_dtype = resolve_dtype(dtype, config, lambda: checkpoint)
    model: Any = build_empty(config, dtype=found_dtype, model_class=model_class, trust_remote_code=trust_remote_code)
    rules = TransformersKeys(model, key_mapping)
    initialized = _settle(model, checkpoint, rules, allow_new_weights=allow_new_weights)

    blocks = no_split_module_classes or model._no_split_modules or None
    place: DeviceMap | Placing | None = device_map
    if initialized and device_map is not None:
        place = _with_initialized_in_ram(
            model,
            find_placing(model, device_map, max_memory=max_memory, no_split_module_classes=blocks, offload_buffers=offload_buffers),
            initialized,
        )
    try:
        model = load_and_dispatch(
            model,
            checkpoint,
            device_map=place,
            max_memory=max_memory,
            no_split_module_classes=blocks,
            rules=rules,
            ignore_missing=[f"^{re.escape(name)}$" for name in initialized],
            strict=strict,
            offload_buffers=offload_buffers,
            quantization=scheme,
            packed_cache=None if packed_cache is None else packed_cache if isinstance(packed_cache, bool) else os.fspath(packed_cache),
            skip_keys=sorted(model._skip_keys_device_placement or ()) or None,
            mmap=mmap,
            reading=reading,
            progress=progress,
        )
    except MatchError as error:
        if explanation := misfit(config, model_class):
            raise MatchError(explanation + str(error)) from error
        raise
    finish(model, path_or_id, folder, rules)
    if scheme is not None:
        note_key_rules(model, partial(TransformersKeys, key_mapping=key_mapping))
    if packed := packed_layers(model) if scheme is not None else {}:
        assert scheme is not None
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in packed]
        used = replace(scheme, format=next(iter(packed.values())).packing)
        described = transformers_config(used, layers)
        if described is not None:
            model.config.quantization_config = described  # for what is saved
    return model


def _one_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """The dtype under either of its names. Raises `PlanError` where they differ."""
    if dtype is None or torch_dtype is None:
        return torch_dtype if dtype is None else dtype
    if str(dtype).removeprefix("torch.") != str(torch_dtype).removeprefix("torch."):
        raise PlanError(f"dtype={dtype!r} and torch_dtype={torch_dtype!r} are two names of one argument: give one of them.")
    return dtype


def _settle(model: Any, checkpoint: Checkpoint, rules: TransformersKeys, *, allow_new_weights: bool) -> list[str]:
    """Decides what the checkpoint leaves open: ties that it contradicts, and weights that it lacks.

    Returns the names of the weights that were initialized instead of loaded.
    """
    found = match(model, checkpoint, rules)
    untied = untie_different(model, checkpoint, rules.found)
    if untied:
        found = match(model, checkpoint, rules)
    ignorable = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    expected = [name for name in found.missing if any(pattern.search(name) for pattern in ignorable)]
    new = [name for name in found.missing if name not in expected] if allow_new_weights else []
    if expected or new:
        initialize_missing(model, [name for name in found.missing if name in expected or name in new])
    if new:
        logger.warning(
            "%s has no values for %d weights of %s. They are newly initialized, so the model has to be trained before use: %s",
            checkpoint.location,
            len(new),
            type(model).__name__,
            ", ".join(new),
        )
    return expected + new


def _with_initialized_in_ram(model: Any, place: Placing, initialized: Collection[str]) -> Placing:
    """The same with entries of their own for initialized weights that would be on disk: they are in no checkpoint, so they rest in RAM."""
    every_name = [name for names in tensor_aliases(model).values() if set(names) & set(initialized) for name in names]
    devices = place.device_map
    unknown = unknown_entries(model, devices)  # the caller was warned of these when the map was checked
    known = {name: device for name, device in devices.items() if name not in unknown}
    return replace(place, device_map=known | {name: "cpu" for name in every_name if device_for(name, devices) == "disk"})
