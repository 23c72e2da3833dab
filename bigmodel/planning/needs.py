"""What a run needs beside weights: the KV cache, activations and workspace, logits; per module, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..devices import accelerators
from ..errors import PlanError
from ..text import bytes_text
from .activations import estimated_activations
from .config_fields import ConfigFields, text_config
from .dry_run import SAMPLING_ITEM_BYTES, DryRun, DryRunError, dry_run
from .kv_cache import CacheLayer, cache_layers
from .live_bytes import ALLOCATION_UNIT_BYTES, rounded
from .sizes import DtypeLike, as_dtype, dtype_byte_size

__all__ = ["Needs", "Workload", "compute_dtype", "needs_of"]

_TASKS_OF_ONE_FORWARD = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForPreTraining",
)
"""How architectures are named in a `config.json`, by what they were trained for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The run that a plan is made for."""

    batch: int = 1
    """Sequences that run together."""
    context: int | None = None
    """Tokens of a sequence, prompt and answer together, that the run has room for; None: nothing is reserved for the run."""
    cache_dtype: DtypeLike | None = None
    """Dtype of the KV cache; None: that of the activations."""
    logits: Literal["all", "last"] = "all"
    """Which logits a forward computes: those of all tokens, as a plain call of a model does, or those of the last one, as transformers'
    `generate` does."""
    example_inputs: Any = field(default=None, compare=False)
    """What the model is called with (a tensor, a sequence of positional or a mapping of keyword arguments, on meta or real: only shapes and
    dtypes are looked at), for models that do not take tokens. Stands in for `batch` and `context` where activations are measured."""

    def __post_init__(self) -> None:
        for name, number in (("batch", self.batch), ("context", self.context)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise PlanError(f"{name}={number!r}: give a whole number of 1 or more.")
        if self.logits not in ("all", "last"):
            raise PlanError(f"logits={self.logits!r}: give 'all' or 'last'.")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a run needs where its modules run."""

    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """By module name: what lives on the device where the module runs for as long as the run lasts (KV cache, logits)."""
    workspace_bytes: int = 0
    """Activations and temporary memory of the hungriest module: kept free on every device that computes."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what could not be known."""


def needs_of(model: nn.Module, workload: Workload, dtype: DtypeLike | None = None, *, on_accelerator: bool = True) -> Needs:
    """The needs of a run of `model` (on meta or real) loaded as `dtype`. Without `workload.context` and example inputs: nothing.

    The run is one forward of the whole context, whose cache stays: it is the most that generating up to this context takes. Its code is
    run on shapes alone (`dry_run`), and what blocks leave behind is their cache. Where that fails, and for models that are only names and
    shapes (`skeleton`), `model.config` (an object, or the mapping of a `config.json`) tells the cache (`cache_layers`) and the
    activations (`estimated_activations`), and a note says so. Logits count for the module that makes them, as far as they are more than
    the workspace, which is free when they come; with what sampling the next token takes.

    `on_accelerator` tells whether an accelerator computes, or the CPU: attention has other kernels there. Where this machine has
    accelerators they are asked for theirs.
    """
    if workload.context is None and workload.example_inputs is None:
        return Needs()
    activations_dtype = compute_dtype(model, dtype)
    notes: list[str] = []
    try:
        run = dry_run(
            model,
            workload.batch,
            workload.context or 1,
            dtype=None if dtype is None else activations_dtype,
            last_logits=workload.logits == "last",
            example_inputs=workload.example_inputs,
            device=next(iter(accelerators()), None) if on_accelerator else torch.device("cpu"),
        )
        notes += run.notes
    except DryRunError as error:
        estimate = _estimated(model, workload, activations_dtype)
        run = estimate or DryRun(0, kept_bytes=None)
        what = "Nothing is reserved for activations" if estimate is None else "Activations are estimated by formula"
        notes.append(f"{what}: the model cannot be run on shapes alone ({error}).")
    state_bytes, unplaced_bytes = _cache(model, workload, activations_dtype, run, notes)
    workspace_bytes = run.workspace_bytes + unplaced_bytes
    if workspace_bytes or state_bytes:
        workspace_bytes += _rounding_bytes(model, None if dtype is None else activations_dtype)
    for name, nbytes in run.extra_bytes.items():
        if any(True for _ in model.get_submodule(name).parameters()):
            state_bytes[name] = state_bytes.get(name, 0) + nbytes
        else:  # what holds no weights runs anywhere
            workspace_bytes += nbytes
    if workload.logits == "all" and run.logits_bytes > run.workspace_bytes:
        notes.append(
            f"Logits of all {workload.context:,} tokens take {bytes_text(run.logits_bytes)}; generate computes those of the last one only "
            "(logits='last', on the command line --logits last)."
        )
    positions = _positions(model)
    if positions and workload.context is not None and workload.context > positions:
        notes.append(f"The configuration tells of {positions:,} positions: a context of {workload.context:,} tokens is beyond them.")
    return Needs(state_bytes, workspace_bytes, tuple(notes))


def _positions(model: nn.Module) -> int:
    """Tokens of the longest sequence that the model's configuration tells of, 0 where it tells of none."""
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
    return 0 if config is None else ConfigFields(text_config(config)).number(*names, default=0)


def compute_dtype(model: nn.Module, dtype: DtypeLike | None) -> torch.dtype:
    """That of activations: `dtype`, or that of the first floating weight; bfloat16 where weights take a byte or less each."""
    if dtype is None:
        found = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    else:
        known = as_dtype(dtype)
        found = known if isinstance(known, torch.dtype) else torch.bfloat16
    return found if found.is_floating_point and found.itemsize > 1 else torch.bfloat16


def _rounding_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """What allocators take for all weights beyond their bytes; no device takes more, whatever it holds."""
    total_bytes, seen, stack = 0, set[int](), [model]
    while stack:
        module = stack.pop()
        stack += [child for child in module._modules.values() if child is not None]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                total_bytes += -(tensor.numel() * kept.itemsize) % ALLOCATION_UNIT_BYTES
    return total_bytes


def _around_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules, in order, with their names, the outermost lists among them but not what these hold."""
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        yield name, module
        if not isinstance(module, nn.ModuleList):
            stack += [(f"{name}.{key}" if name else key, child) for key, child in reversed(module._modules.items()) if child is not None]


def _cache(model: nn.Module, workload: Workload, dtype: torch.dtype, run: DryRun, notes: list[str]) -> tuple[dict[str, int], int]:
    """Bytes of the cache by block, and those that no block is found for."""
    kept = run.kept_bytes
    if workload.context is None or (kept is not None and (not kept or workload.cache_dtype is None)):
        return dict(kept or {}), 0
    config = getattr(model, "config", None)
    item_bytes = dtype_byte_size(dtype if workload.cache_dtype is None else workload.cache_dtype)
    layers = None if config is None else cache_layers(config)
    if layers is None:
        if kept is None:
            notes.append("Nothing is reserved for the KV cache: the configuration does not tell its size.")
        return {name: math.ceil(nbytes * item_bytes / dtype.itemsize) for name, nbytes in (kept or {}).items()}, 0
    if kept is None and _makes_no_text(config):
        return {}, 0
    sizes = [layer.bytes_held(workload.batch, workload.context, workload.context, item_bytes) for layer in layers]
    names = _layer_names(model, layers)
    if names is None:
        notes.append("The layers that the configuration tells of are not found in the model: its cache is kept free on every device.")
        return {}, sum(sizes)
    return {name: nbytes for name, nbytes in zip(names, sizes, strict=True) if nbytes}, 0


def _makes_no_text(config: Any) -> bool:
    """Whether the configuration says that the model was made for tasks that take one forward, without a cache."""
    names = ConfigFields(config).get("architectures")
    return isinstance(names, list | tuple) and bool(names) and all(str(name).endswith(_TASKS_OF_ONE_FORWARD) for name in names)


def _layer_names(model: nn.Module, layers: list[CacheLayer]) -> list[str] | None:
    """The modules that the layers are: of the lists of that length or more the decoder's, else the one whose layers hold most."""
    found: dict[str, tuple[bool, bool, int]] = {}
    for name, module in _around_layers(model):
        if isinstance(module, nn.ModuleList) and len(module) >= len(layers):
            elements = sum(tensor.numel() for tensor in module[-1].parameters())
            found[name] = ("decoder" in name.split("."), len(module) == len(layers), elements)
    if not found:
        return None
    path = max(found, key=lambda name: found[name])
    return [f"{path}.{index}" for index in range(len(layers))]


def _estimated(model: nn.Module, workload: Workload, dtype: torch.dtype) -> DryRun | None:
    """Activations by formula, in the form of a dry run that saw no cache; None if there is nothing to tell them from."""
    if workload.context is None:
        return None
    found = estimated_activations(
        getattr(model, "config", None), workload.batch, workload.context, dtype.itemsize, last_logits=workload.logits == "last"
    )
    if found is None:
        return None
    sampling_bytes = rounded(workload.batch * found.vocabulary * SAMPLING_ITEM_BYTES)
    excess_bytes = max(0, found.logits_bytes + sampling_bytes - found.workspace_bytes)
    head = _head(model, found.vocabulary)
    if head is None:
        return DryRun(found.workspace_bytes + excess_bytes, kept_bytes=None, logits_bytes=found.logits_bytes)
    return DryRun(found.workspace_bytes, {head: excess_bytes}, kept_bytes=None, logits_bytes=found.logits_bytes)


def _head(model: nn.Module, vocabulary: int) -> str | None:
    """The last module that holds a matrix with a row for each entry of the vocabulary."""
    last = None
    for name, module in _around_layers(model):
        if any(tensor is not None and tensor.dim() == 2 and tensor.shape[0] == vocabulary for tensor in module._parameters.values()):
            last = name
    return last
