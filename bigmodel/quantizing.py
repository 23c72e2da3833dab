"""What quantization changes in a load: weights are packed as they arrive, or a checkpoint that is packed fills packed layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from .dispatch import replace_method
from .errors import QuantizationError
from .loading import (
    Checkpoint,
    DtypeOf,
    KeyRules,
    LoadReport,
    as_dtype,
)
from .packed_checkpoint import fill_places, keep_places
from .protocols import Packer, Read, Store, TensorSpec, WeightFormat
from .quantization import (
    FourBit,
    Scheme,
    WeightPacker,
    chosen_by,
    install,
    note_bits,
    note_scheme,
    packed_layers,
    run_by_index,
    scheme_of,
    stacks_of,
    stored_weights,
)
from .text import bytes_text, names_text

__all__ = ["QuantizedLoad", "quantized_load", "refuse_resizing", "warn_of_silent_config"]

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
    scales: frozenset[str] = frozenset()
    """Full names of the scales (and tables of values) of packed weights that are loaded as they are."""

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
        run_by_index(model)
        _tell_of_stacks(model)
        if report.store is not None:
            _note_offsets(model, report.store)
        note_bits(model)
        refuse_resizing(model)


def refuse_resizing(model: nn.Module) -> None:
    """Lets `resize_token_embeddings` of a model of transformers say which table or head is packed, where one is."""
    if hasattr(model, "resize_token_embeddings") and _packed_tables(model):
        replace_method(model, "resize_token_embeddings", _resize_token_embeddings)


def _packed_tables(model: Any) -> list[str]:
    tables = []
    for ask in (model.get_input_embeddings, model.get_output_embeddings):
        with contextlib.suppress(NotImplementedError):  # models of pictures or sound
            tables.append(ask())
    return [name for name, layer in packed_layers(model).items() if any(layer is table for table in tables)]


def _resize_token_embeddings(model: Any, new_num_tokens: int | None = None, *others: Any, **named: Any) -> Any:
    """In the place of transformers' own. Raises `QuantizationError`: rows cannot be added to packed weights, nor taken away."""
    if new_num_tokens is None and not others and not named:
        return model.get_input_embeddings()
    packed = _packed_tables(model)
    raise QuantizationError(
        f"{names_text(packed)}: packed, so no rows can be added or taken away. Resize the model before it is packed (load it without "
        "quantization, resize it, save it), or load it with these left unpacked (`skip_modules`, or without `pack_embeddings`)."
    )


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

    Raises `QuantizationError` for a config that is none or of another format than the checkpoint's, and for packed weights that have no
    place in the model.
    """
    scheme = None if quantization is None else scheme_of(quantization)
    entries: Any = checkpoint.entries
    stored = stored_weights(entries)
    filled = fill_places(model, checkpoint, stored, scheme, rules) if stored else None
    if filled is None and scheme is None:
        yield QuantizedLoad(dtype_of, rules)
        return
    if filled is None and scheme is not None:
        filled = keep_places(model, checkpoint, scheme, rules)
    if filled is not None:
        used = filled.scheme
        rule = _dtype_rule(used, dtype if dtype is not None else used.dtype, dtype_of, filled.packed)
        unpacked_to = _dtype_rule(used, dtype if dtype is not None else used.dtype, dtype_of)
        for name, each in filled.unpacking.items():
            each.original_dtype = unpacked_to(name, TensorSpec(each.shape, filled.dtypes[name]), each.original_dtype)
        try:
            beside = frozenset(name for name in filled.packed if name.rpartition(".")[2] != "weight")
            yield QuantizedLoad(rule, filled.rules, used, scales=beside)
        except BaseException:
            filled.undo()
            raise
        return
    assert scheme is not None
    if scheme.dtype is not None and dtype is None:
        dtype = scheme.dtype
    chosen = chosen_by(scheme.format, model)
    _tell_of_idle_names(model, scheme)
    if not (chosen.packed or chosen.stacks or chosen.tables):
        reasons = ", ".join(dict.fromkeys(chosen.left.values()))
        logger.warning("Nothing of %s is packed as %s: %s.", type(model).__name__, scheme.format.name, reasons or "it has no linear layer")
    rule = _dtype_rule(scheme, dtype, dtype_of)
    names = [*(f"{name}.weight" for name in (*chosen.packed, *chosen.tables)), *chosen.stacks]
    weights = dict(model.named_parameters(remove_duplicate=False))
    dtypes = [(name, str(weights[name].dtype if dtype is None else as_dtype(dtype))) for name in names]
    file = None if not packed_cache else _packed_file(checkpoint, scheme, dtypes, packed_cache)
    yield QuantizedLoad(rule, rules, scheme, WeightPacker(scheme.format, chosen.packed, chosen.stacks, chosen.tables), file)


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


def _packed_file(checkpoint: Checkpoint, scheme: Scheme, weights: list[tuple[str, str]], cache: bool | str | Path) -> Path:
    """The file for these weights (name, dtype) in this format: its name tells files, their sizes and times, what is packed and of what.

    Raises `QuantizationError` where there is none and none can be written.
    """
    location = Path(str(checkpoint.location))
    folder = (location if location.is_dir() else location.parent) / CACHE_FOLDER if cache is True else Path(str(cache))
    content = [
        sorted((str(file), str(identity)) for file, identity in checkpoint.identities.items()),
        repr(replace(scheme.format, skip_modules=None, kept=())),
        sorted(weights),
        "" if scheme.format.library is None else version(scheme.format.library),
    ]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    file = folder / f"{scheme.format.name}-{key}.safetensors"
    there = next(parent for parent in file.parents if parent.exists())
    if not file.exists() and not os.access(there, os.W_OK):
        raise QuantizationError(
            f"{folder}: packed weights cannot be kept there, {there} may not be written to. Give another folder as `packed_cache`, or none."
        )
    return file


def _tell_of_idle_names(model: nn.Module, scheme: Scheme) -> None:
    """Warns of names that were to be left as they are, and name nothing."""
    asked = dict.fromkeys((*(scheme.format.skip_modules or ()), *scheme.format.kept))
    paths = [f".{name}." for name, _ in (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))]
    idle = [name for name in asked if not any(f".{name}." in path for path in paths)]
    if idle:
        logger.warning("%s has nothing of the names that were to be left unpacked: %s.", type(model).__name__, names_text(idle))


def _tell_of_stacks(model: nn.Module) -> None:
    """Warns where stacks of expert matrices stay unpacked: they may be most of the model."""
    stacked = [(name, stack) for name, module in model.named_modules() for stack in stacks_of(name, module).values()]
    nbytes = sum(stack.numel() * stack.element_size() for _, stack in stacked)
    if nbytes:
        logger.warning(
            "%s of stacked experts stay unpacked (%s). bigmodel.quantization_report(model) says why.",
            bytes_text(nbytes),
            names_text(list(dict.fromkeys(name for name, _ in stacked))[:8]),
        )


def _note_offsets(model: nn.Module, store: Store) -> None:
    """Tells layers whose packed bytes stay on disk the numbers that state dicts need."""
    waiting: dict[str, Any] = {
        f"{name}.nested_offset": layer
        for name, layer in packed_layers(model).items()
        if isinstance(layer.packing, FourBit) and layer.packing.double_quant and layer.nested_offset_value is None
    }
    values = {name: torch.empty(store.spec(name).shape, dtype=torch.float32) for name in waiting}
    store.read_into([Read(name, value) for name, value in values.items()])
    for name, layer in waiting.items():
        layer.nested_offset_value = values[name].item()


def warn_of_silent_config(model: nn.Module, folder: Path) -> None:
    """Warns where packed weights were saved beside a `config.json` that does not say so: transformers would take bytes for weights."""
    config = folder / "config.json"
    if not packed_layers(model) or not config.is_file():
        return
    try:
        silent = "quantization_config" not in json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, TypeError):
        silent = True
    if silent:
        logger.warning(
            "The weights in %s are packed, and %s has no quantization_config: bigmodel loads them, transformers would load wrong values. "
            "A model of transformers is saved together with its config by model.save_pretrained(folder).",
            folder,
            config.name,
        )
