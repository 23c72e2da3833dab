"""What quantization changes in a load: weights are packed as they arrive, or a checkpoint that is packed fills packed layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from .errors import MatchError, QuantizationError
from .loading import (
    Checkpoint,
    Computed,
    DtypeOf,
    Entry,
    KeyRules,
    LoadReport,
    SameNames,
    Source,
    Whole,
    as_dtype,
    read_tensors,
)
from .protocols import Packer, Read, Store, TensorSpec, WeightFormat
from .quantization import (
    Description,
    FourBit,
    Int8,
    Places,
    Scheme,
    StoredWeight,
    WeightPacker,
    described,
    install,
    is_linear,
    is_stack,
    matrix_shape,
    note_scheme,
    packed_layers,
    plain_forward,
    scheme_of,
    select,
    stored_weights,
)
from .text import bytes_text, names_text

__all__ = ["QuantizedLoad", "quantized_load"]

logger = logging.getLogger(__name__)

CACHE_FOLDER: Final = ".bigmodel-packed"
"""Beside the checkpoint: where packed weights are kept for the next load."""


@dataclass(frozen=True, slots=True)
class QuantizedLoad:
    """What the steps of a load need to know. Of a load without quantization it says nothing new."""

    dtype_of: DtypeOf | None
    rules: KeyRules | None
    scheme: Scheme | None = None
    packer: Packer | None = None
    """What packs weights; None where the checkpoint's are packed already, or nothing is."""
    packed_file: Path | None = None
    """Where packed weights are kept for the next load."""

    @property
    def weight_format(self) -> WeightFormat | None:
        """For the plan: the format that weights will be packed in. Layers that are packed already speak for themselves."""
        return None if self.packer is None or self.scheme is None else self.scheme.format

    def install(self, model: nn.Module, report: LoadReport) -> None:
        """Puts what was packed into the model."""
        if self.scheme is None:
            return
        install(model, self.scheme, {name: (kept.spec.dtype, kept.tensors) for name, kept in report.packed.items()})
        note_scheme(model, self.scheme)
        _tell_of_stacks(model)
        if report.store is not None:
            _note_offsets(model, report.store)
        is_4bit = any(isinstance(layer.packing, FourBit) for layer in packed_layers(model).values())
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = is_4bit, not is_4bit  # type: ignore[assignment]


@contextlib.contextmanager
def quantized_load(
    model: nn.Module,
    checkpoint: Checkpoint,
    quantization: Any,
    *,
    rules: KeyRules | None,
    dtype: torch.dtype | str | None,
    dtype_of: DtypeOf | None,
    packed_cache: bool | str | Path | None = None,
) -> Iterator[QuantizedLoad]:
    """Prepares a load with the config `quantization` (None: as the checkpoint is). An error in the block leaves the model as it was.

    A checkpoint that holds packed weights is loaded as it is: the model's layers become packed ones at once, on meta, and `quantization`
    says what they compute in. Otherwise weights are packed on the way, and kept for the next load if `packed_cache` is a folder, or True
    for one beside the checkpoint.

    Raises `QuantizationError` for a config that is none or of another format than the checkpoint's, and for packed weights that no linear
    layer can take.
    """
    scheme = None if quantization is None else scheme_of(quantization)
    stored = stored_weights(checkpoint.entries)  # type: ignore[arg-type]
    if scheme is None and not stored:
        yield QuantizedLoad(dtype_of, rules)
        return
    if stored:
        undo, job = _with_packed_layers(model, checkpoint, stored, scheme, rules, dtype, dtype_of)
        try:
            yield job
        except BaseException:
            undo()
            raise
        return
    assert scheme is not None
    if scheme.dtype is not None and dtype is None:
        dtype = scheme.dtype
    chosen = select(model, scheme.format.skip_modules, scheme.format.kept).packed
    rule = _dtype_rule(scheme, dtype, dtype_of)
    file = None if not packed_cache else _packed_file(checkpoint, scheme, dtype, packed_cache)
    yield QuantizedLoad(rule, rules, scheme, WeightPacker(scheme.format, chosen), file)


def _dtype_rule(scheme: Scheme, dtype: torch.dtype | str | None, dtype_of: DtypeOf | None, packed: frozenset[str] = frozenset()) -> DtypeOf:
    """The dtype of each tensor: `packed` ones keep theirs, what is kept in float32 is in float32, others are as without quantization."""
    wanted = None if dtype is None else as_dtype(dtype)

    def rule(name: str, spec: TensorSpec, in_file: torch.dtype) -> torch.dtype:
        if name in packed or not spec.dtype.is_floating_point:
            return spec.dtype
        if any(f".{kept}." in f".{name}." for kept in scheme.keep_in_fp32):
            return torch.float32
        return dtype_of(name, spec, in_file) if dtype_of is not None else wanted or spec.dtype

    return rule


def _packed_file(checkpoint: Checkpoint, scheme: Scheme, dtype: torch.dtype | str | None, cache: bool | str | Path) -> Path:
    """The file for these weights in this format: its name tells files, their sizes and times, and all that decides the packed bytes."""
    location = Path(str(checkpoint.location))
    folder = (location if location.is_dir() else location.parent) / CACHE_FOLDER if cache is True else Path(str(cache))
    content = [
        sorted((str(file), str(identity)) for file, identity in checkpoint.identities.items()),
        repr(replace(scheme.format, skip_modules=None, kept=())),
        str(dtype),
        version("bitsandbytes"),
    ]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    return folder / f"{scheme.format.name}-{key}.safetensors"


# --- Checkpoints that hold packed weights ---


@dataclass(frozen=True, slots=True)
class _PackedKeys:
    """Key rules for packed checkpoints: `inner` finds the weights, and their companions follow them."""

    inner: KeyRules
    companions: Mapping[str, Source]
    """Full name of a companion in the model → what fills it."""
    consumed: frozenset[str]
    """Names in the checkpoint that are no matter of `inner`."""

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """See `KeyRules.sources`."""
        others = {name: entry for name, entry in entries.items() if name not in self.consumed}
        wanted = {name: spec for name, spec in targets.items() if name not in self.companions}
        found, unused = self.inner.sources(others, wanted)
        return {**found, **self.companions}, unused


def _with_packed_layers(
    model: nn.Module,
    checkpoint: Checkpoint,
    stored: list[StoredWeight],
    scheme: Scheme | None,
    rules: KeyRules | None,
    dtype: torch.dtype | str | None,
    dtype_of: DtypeOf | None,
) -> tuple[Callable[[], None], QuantizedLoad]:
    """Replaces the layers of the packed weights by packed ones, on meta; what undoes it, and how they are filled."""
    from .quantization.layers import packed_layer  # imports bitsandbytes, which takes seconds

    inner = rules or SameNames()
    entries = checkpoint.entries
    found, _ = inner.sources({each.weight: entries[each.weight] for each in stored}, _specs(model))
    names = {source.name: target for target, source in found.items() if isinstance(source, Whole)}
    descriptions = _descriptions(checkpoint, stored)
    places = Places(model)
    replaced: list[tuple[nn.Module, nn.Module]] = []

    def undo() -> None:
        back = Places(model)
        for linear, layer in replaced:
            back.put(layer, linear)

    companions: dict[str, Source] = {}
    consumed: set[str] = set()
    packed: set[str] = set()
    schemes: list[Scheme] = []
    try:
        for each in stored:
            target = names.get(each.weight)
            if target is None:
                continue  # a weight that the model has no use for; the match says so
            linear = model.get_submodule(target.rpartition(".")[0])
            if not is_linear(linear) or not plain_forward(linear):
                raise QuantizationError(
                    f"{each.weight} is packed, and {target} belongs to a {type(linear).__name__}: only linear layers can be."
                )
            own = _scheme_of_stored(each, entries[each.weight], descriptions.get(each.weight), scheme)
            described_shape = descriptions[each.weight].shape if each.description else entries[each.weight].shape
            if described_shape != matrix_shape(linear):
                raise MatchError(
                    f"{each.weight} was packed from shape {list(described_shape)}; the model has {list(matrix_shape(linear))} in {target}."
                )
            original = descriptions[each.weight].dtype if each.description else torch.float16
            layer = packed_layer(linear, own, original)
            prefix = target.removesuffix("weight")
            companions |= {prefix + attribute: Whole(name) for attribute, name in each.companions.items()}
            offset = descriptions[each.weight].nested_offset if each.description else None
            if offset is not None:
                companions[prefix + "nested_offset"] = _constant(offset, each.description or "")
                layer.nested_offset_value = offset
            packed |= {prefix + attribute for attribute in own.format.tensors((1, 1))}
            consumed |= set(each.beside())
            schemes.append(own)
            places.put(linear, layer)
            replaced.append((linear, layer))
    except BaseException:
        undo()
        raise
    if not schemes:
        raise MatchError(f"{checkpoint.location} holds {len(stored)} packed weights, and none of them has a place in the model.")
    used = scheme or schemes[0]
    rule = _dtype_rule(used, dtype if dtype is not None else used.dtype, dtype_of, frozenset(packed))
    keys = _PackedKeys(inner, companions, frozenset(consumed))
    return undo, QuantizedLoad(rule, keys, used)


def _specs(model: nn.Module) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in model.named_parameters(remove_duplicate=False)}


def _descriptions(checkpoint: Checkpoint, stored: list[StoredWeight]) -> dict[str, Description]:
    """What the checkpoint says about its 4-bit weights, by the name of the weight there."""
    weights = {each.description: each.weight for each in stored if each.description is not None}
    return {weights[name]: described(weights[name], content) for name, content in read_tensors(checkpoint, weights).items()}


def _scheme_of_stored(each: StoredWeight, entry: Entry, description: Description | None, scheme: Scheme | None) -> Scheme:
    """The format of the packed bytes, with what `scheme` says about computing. Raises `QuantizationError` where it asks for other bits."""
    packing: FourBit | Int8 = Int8() if description is None else FourBit(description.quant_type, description.double_quant, entry.dtype)
    if scheme is None:
        return Scheme(packing)
    if type(scheme.format) is not type(packing):
        raise QuantizationError(
            f"{each.weight} is packed as {packing.name}, and the config asks for {scheme.format.name}: load it without a config, or load "
            "the original checkpoint with it."
        )
    return replace(scheme, format=packing)


def _constant(value: float, entry: str) -> Computed:
    """A number as a tensor. (A source reads something; this one reads the few bytes of the description that the number comes from.)"""
    return Computed((Whole(entry),), lambda _: torch.tensor(value, dtype=torch.float32), (), torch.float32)


def _tell_of_stacks(model: nn.Module) -> None:
    """Warns where stacks of expert matrices stay unpacked: they may be most of the model."""
    stacked = [(name, module) for name, module in model.named_modules() if is_stack(module)]
    nbytes = sum(tensor.numel() * tensor.element_size() for _, module in stacked for tensor in module.parameters(recurse=False))
    if nbytes:
        logger.warning(
            "%s of stacked experts stay unpacked (%s): bitsandbytes has no layer for them. bigmodel.quantization_report(model) lists them.",
            bytes_text(nbytes),
            names_text(name for name, _ in stacked[:8]),
        )


def _note_offsets(model: nn.Module, store: Store) -> None:
    """Tells layers whose packed bytes stay on disk the numbers that state dicts need."""
    waiting: dict[str, Any] = {
        f"{name}.nested_offset": layer
        for name, layer in packed_layers(model).items()
        if isinstance(layer.packing, FourBit) and layer.packing.double_quant and layer.nested_offset_value is None
    }
    values = {name: torch.empty((), dtype=torch.float32) for name in waiting}
    store.read_into([Read(name, value) for name, value in values.items()])
    for name, layer in waiting.items():
        layer.nested_offset_value = values[name].item()
