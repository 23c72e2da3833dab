"""Quantizing a model under the names that scripts know: loaded already or from a checkpoint, and the device map for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from .api import dispatch_model, load_and_dispatch
from .devices import DeviceKey, accelerators, as_key
from .dispatch import align_module_device, dispatched
from .errors import MatchError, MissingPackageError, QuantizationError
from .loading import Checkpoint, KeyRules, Reader, SameNames, lower, offload_weight, set_module_tensor_to_device
from .placing import DeviceMap, find_placing
from .protocols import TensorSpec
from .quantization import (
    BnbQuantizationConfig,
    Int8,
    QuantizationReport,
    Scheme,
    key_rules,
    note_bits,
    note_scheme,
    pack,
    packed_layers,
    report,
    scheme_of,
)
from .quantization import replace_with_bnb_layers as replace_layers
from .quantizing import refuse_resizing

__all__ = [
    "get_quantized_model_device_map",
    "load_and_quantize_model",
    "quantization_report",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
]

logger = logging.getLogger(__name__)

OLDEST_BITSANDBYTES: Final = (0, 50)
"""The oldest release that the tests ran with."""


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | Path | None = None,
    device_map: DeviceMap | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | Path | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Packs the linear layers of `model` to 4 or 8 bits: while they are read from `weights_location`, or where they are, if it is loaded.

    Args:
        model: on meta, or loaded (its memory is then freed layer by layer, but it was all there once).
        bnb_quantization_config: is not changed. transformers' `BitsAndBytesConfig` will do, and so does the name of a packed format.
        weights_location: a checkpoint (file, folder or index) for a model on meta; one that is packed already is loaded as it is.
        device_map: as in `load_and_dispatch`; by default everything is on the first accelerator, or on the CPU where there is none. Packed
            weights rest on the CPU, on disk and on accelerators.
        no_split_module_classes, max_memory: as in `load_and_dispatch`.
        offload_folder: keeps the packed weights for the next load; without it, those that rest on disk are in a private temporary file.
        offload_state_dict: accepted for old scripts; memory stays flat without it.

    Returns the same model, with `is_loaded_in_4bit` and `is_loaded_in_8bit` set. Raises `QuantizationError` for a config that is none, and
    for a model that is packed or dispatched already; `MatchError` (a RuntimeError) for a model on meta without a checkpoint; and the errors
    of `load_and_dispatch`.
    """
    scheme = scheme_of(bnb_quantization_config)
    _refuse_old_bitsandbytes(scheme)
    _refuse_dispatched(model)
    first = next(model.parameters(), None)
    if first is None or first.device.type != "meta":
        return _quantize_loaded(model, scheme, device_map, max_memory, no_split_module_classes, offload_folder)
    if weights_location is None:
        raise MatchError(
            f"{type(model).__name__} is on meta, so it has no weights to pack: give `weights_location`, the folder, file or index of its "
            "checkpoint."
        )
    return load_and_dispatch(
        model,
        Checkpoint.open(weights_location),
        device_map=_default_device() if device_map is None else device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        quantization=scheme,
        packed_cache=offload_folder,
    )


def _default_device() -> DeviceKey:
    return next((as_key(device) for device in accelerators()), "cpu")


def _quantize_loaded(
    model: nn.Module,
    scheme: Scheme,
    device_map: DeviceMap | None,
    max_memory: Mapping[Any, int | str] | None,
    no_split_module_classes: str | Collection[str] | None,
    offload_folder: str | Path | None,
) -> nn.Module:
    before = {layer.packing.name for layer in packed_layers(model).values()}
    if before:
        raise QuantizationError(
            f"{type(model).__name__} is packed already ({', '.join(sorted(before))}): load it anew to pack it as {scheme.format.name}, or "
            "call dispatch_model to place it."
        )
    logger.warning(
        "It is not recommended to quantize a loaded model: all of it was in memory. Build it under `init_empty_weights` and give the "
        "checkpoint as `weights_location`."
    )
    replace_layers(model, scheme)
    note_scheme(model, scheme)
    packed = {id(tensor) for layer in packed_layers(model).values() for tensor in layer.packed_tensors().values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in packed and parameter.is_floating_point():
            in_fp32 = any(f".{kept}." in f".{name}." for kept in scheme.keep_in_fp32)
            parameter.data = parameter.data.to(torch.float32 if in_fp32 else scheme.dtype or parameter.dtype)
    note_bits(model)
    refuse_resizing(model)
    place = find_placing(
        model,
        _default_device() if device_map is None else device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
    )
    return dispatch_model(model, place.device_map, main_device=place.main_device, offload_dir=offload_folder)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: DeviceMap | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
) -> dict[str, DeviceKey]:
    """The device map for `model` once it is packed: planned with the packed sizes where `device_map` names a strategy, else checked.

    None is everything on the first accelerator, or on the CPU where there is none. Raises `PlanError` (a ValueError) for a map that cannot
    work.
    """
    scheme = scheme_of(bnb_quantization_config)
    place = find_placing(
        model,
        _default_device() if device_map is None else device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=scheme.dtype,
        weight_format=scheme.format,
    )
    return place.device_map


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | Path,
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Writes the weight `param` in 8 bits, and its scales (`SCB`), to an offload folder and its index; the model's own goes to meta.

    With `fp16_statistics`, its scales, `param` is packed already. Loaders do this by themselves; it is here for scripts.
    """
    if fp16_statistics is None:
        tensors = pack(param if new_dtype is None else param.to(new_dtype), Int8())
    else:
        tensors = {"weight": param, "SCB": fp16_statistics}
    beside = param_name.rpartition(".")[0]
    offload_weight(tensors["weight"], param_name, offload_folder, index=offload_index)
    offload_weight(tensors["SCB"], f"{beside}.SCB" if beside else "SCB", offload_folder, index=offload_index)
    set_module_tensor_to_device(model, param_name, "meta", dtype=new_dtype, value=torch.empty(param.shape, device="meta"))


def quantization_report(model: nn.Module, checkpoint: str | Path | None = None, rules: KeyRules | None = None) -> QuantizationReport:
    """What is packed in `model`, what is left and why, in bytes. `print` it.

    With the unpacked `checkpoint` each packed weight is compared with the original one: relative error in the Frobenius norm, and the
    largest change of an element. One weight at a time is read. `rules` say what fills it: by default those that `from_pretrained`
    loaded the model with, or equal names. Raises `MatchError` for a weight that the checkpoint lacks.
    """
    if checkpoint is None:
        return report(model)
    opened = Checkpoint.open(checkpoint)
    entries: Any = opened.entries
    targets: dict[str, TensorSpec] = {}
    for name, layer in packed_layers(model).items():
        shape = layer.shape[::-1] if getattr(layer, "from_transposed", False) else layer.shape
        targets[layer.original_name(name)] = TensorSpec(shape, layer.original_dtype)
    sources, _ = (rules or key_rules(model) or SameNames()).sources(entries, targets)

    def original(name: str) -> torch.Tensor:
        if name not in sources:
            raise MatchError(
                f"{opened.location} has no {name!r} to compare with: give the checkpoint that was packed, and, if its names are "
                "others, the `rules` that it was loaded with."
            )
        transfer = lower(sources[name], entries, name, targets[name].dtype)
        value = torch.empty(transfer.shape, dtype=transfer.dtype)
        reader = Reader(opened.identities)
        try:
            reader.read([(transfer, value)])
        finally:
            reader.close()
        return value

    return report(model, original, align_module_device)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: Any,
    modules_to_not_convert: str | Collection[str] | None = None,
    current_key_name: Collection[str] | None = None,
) -> nn.Module:
    """See `bigmodel.quantization.replace_with_bnb_layers`. Raises `QuantizationError` for a model that is dispatched, too."""
    _refuse_dispatched(model)
    replace_layers(model, bnb_quantization_config, modules_to_not_convert, current_key_name)
    refuse_resizing(model)
    return model


def _refuse_dispatched(model: nn.Module) -> None:
    if dispatched(model) is not None:
        raise QuantizationError(
            f"{type(model).__name__} is dispatched, so weights of it may be elsewhere: load it with `quantization=`, or call "
            "bigmodel.undispatch first."
        )


def _refuse_old_bitsandbytes(scheme: Scheme) -> None:
    """Raises an ImportError for 8 bits, and a ValueError for 4 bits, where bitsandbytes is older than what the layers here are made for."""
    if scheme.format.library != "bitsandbytes":
        return
    found = version("bitsandbytes")
    if tuple(int(part) for part in found.split(".")[:2]) >= OLDEST_BITSANDBYTES:
        return
    oldest = ".".join(map(str, OLDEST_BITSANDBYTES))
    story = f"bitsandbytes {found} is installed; {scheme.format.name} needs {oldest} or newer: pip install -U bitsandbytes."
    raise MissingPackageError(story) if isinstance(scheme.format, Int8) else QuantizationError(story)
