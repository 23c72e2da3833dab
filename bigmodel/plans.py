"""`bigmodel.plan`: plans a model from whatever is known of it, a module or the headers of a checkpoint that is not here."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import nn

from . import planning
from .collecting import without_collecting
from .errors import PlanError
from .modules import class_names, tensor_aliases
from .named_budgets import named_budgets
from .planning import Plan
from .planning.predicting import MachineLike
from .planning.sizes import DtypeLike, as_dtype
from .protocols import WeightFormat
from .quantization import FORMAT_NAMES
from .quantization import weight_format as find_format
from .quantization.formats import weight_formats
from .sources import Wanted, find_tree

__all__ = ["buildable_dtype", "plan", "split_dtype"]

ADVISED_FORMATS: Final = ("int8", "nf4")


@without_collecting()
def plan(
    source: nn.Module | str | os.PathLike[str] | Mapping[str, Any] | Any,
    max_memory: Mapping[Any, int | str] | None = None,
    *,
    dtype: DtypeLike | WeightFormat | None = None,
    weight_format: WeightFormat | str | None = None,
    context: int | None = None,
    batch: int = 1,
    cache_dtype: DtypeLike | None = None,
    logits: Literal["all", "last"] = "all",
    example_inputs: Any = None,
    no_split_module_classes: str | Collection[str] | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    mode: str = "auto",
    offload_buffers: bool = False,
    machine: MachineLike | None = None,
    objective: str | None = None,
    execution: Literal["main", "auto"] = "main",
    advice: bool = True,
    model_class: Any = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Decides where every weight of a model shall live, and says why. Nothing is loaded, no hardware is needed.

    Args:
        source: what is known of the model:

            - a module, real or on meta;
            - a configuration of transformers;
            - a checkpoint on this machine (file, folder, `*.index.json`), of which only the headers are read. With a `config.json` beside
              it and transformers installed, the model's own code says what there is; otherwise the tensors' names and shapes do;
            - a repository on the hub (`"owner/name"`), of which the headers and `config.json` are fetched, no weights;
            - a dump of headers: a `.json` file, or the mapping in it, as `bigmodel inspect --json` prints it, as it stands in a safetensors
              file, or plain `{name: {"dtype": "bfloat16", "shape": [4096, 4096]}}`.
        max_memory: what each device offers, in bytes, as text, or as the name of an accelerator (`{0: "24GiB", 1: "RTX 4090",
            "cpu": "64GB"}`); devices need not exist. Devices that are not named are not used, except "disk". Of a named accelerator 90 % of
            the memory are planned with. Without `max_memory` this machine is measured.
        dtype: what floating weights are loaded as, a torch dtype or its name; or a packed format (`"nf4"`, `"int8"`, `"fp8"`, …),
            which leaves what it does not pack as it is.
        weight_format: a packed format beside a `dtype` for what is not packed.
        context: tokens per sequence, prompt and answer together: the plan keeps room for the KV cache, activations and logits of a forward
            of all of them. Without it (and `example_inputs`) budgets are for weights alone: those that are given are taken whole, measured
            ones leave 5 % of an accelerator and 10 % of RAM for everything else.
        batch: sequences that run together.
        cache_dtype: of the KV cache; by default that of the activations.
        logits: "all" keeps room for those of all tokens (batch × context × vocabulary), as a plain call of a model computes them; "last"
            for those of the last one (batch × vocabulary): enough for transformers' `generate`.
        example_inputs: what the model is called with, for models that do not take tokens: a tensor, a sequence of positional or a mapping
            of keyword arguments, of which only shapes and dtypes matter.
        no_split_module_classes: names of classes that are never split across devices; found in the model without it.
        special_dtypes: dtypes of single tensors, by name.
        mode: "auto" and "balanced" fill accelerators evenly if everything fits, "balanced_low_0" leaves the first as empty as it can be,
            "sequential" fills one after the other.
        offload_buffers: whether the buffers of offloaded modules travel with them.
        machine: how fast the devices are, for `Plan.prediction`: a `Machine`, "measured" (what `bigmodel bench` kept), or names of
            accelerators ("RTX 4090" for all, `{0: "RTX 4090", 1: "T4"}`). Without it the names in `max_memory`, or what is known of this
            machine.
        objective: None moves as few bytes as possible. "latency" leaves out devices that a step is expected to be faster without;
            "throughput" takes the batch (`batch` or more) that is expected to give the most tokens per second.
        execution: "main" runs everything that is offloaded on the main device. "auto" lets modules that rest in RAM run there
            ("cpu:resident" in the map; activations travel instead of weights) where a step is expected to take less that way.
        advice: whether to say what would help where something travels, which takes about ten more plans.
        model_class: a model class of transformers, an `Auto…` class, or the name of either, for a configuration that names no architecture,
            or another one than is meant.
        trust_remote_code: whether code that lies beside a checkpoint may run.

    Returns:
        The plan: `print` it, hand it to a loader as `device_map`, `plot` it, keep it as text (`to_json`).

    Raises:
        PlanError: a model without tensors, an unknown device, a size that cannot be read, or budgets that cannot work. CheckpointError:
        a damaged checkpoint or dump, or none. MissingPackageError: a package that `source` needs is not installed.
    """
    budgets = named_budgets(max_memory)
    packed, plain_dtype = split_dtype(dtype, weight_format)
    buildable = buildable_dtype(plain_dtype)
    tree = find_tree(source, Wanted(buildable, plain_dtype is not None, model_class, trust_remote_code))
    made = planning.plan(
        tree.model,
        budgets.max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=None if tree.is_built and buildable else plain_dtype,
        special_dtypes=special_dtypes,
        mode=mode,
        offload_buffers=offload_buffers,
        weight_format=packed,
        batch=batch,
        context=context,
        cache_dtype=cache_dtype,
        logits=logits,
        example_inputs=example_inputs,
        machine=budgets.machine if machine is None else machine,
        objective=objective,
        execution=execution,
        advice=advice,
        formats=weight_formats(ADVISED_FORMATS),
    )
    ignored = _ignored(tree.model, special_dtypes or {}, class_names(no_split_module_classes))
    if context is None and example_inputs is None:
        given = [name for name, is_given in (("batch", batch != 1), ("cache_dtype", cache_dtype), ("logits", logits != "all")) if is_given]
        if given:
            ignored.append(f"{' and '.join(given)} changed nothing: room for a run is kept where a context (in tokens) is given.")
    return replace(made, model=tree.name or made.model, notes=(*ignored, *made.notes, *tree.notes, *budgets.notes))


def _ignored(model: nn.Module, special_dtypes: Mapping[str, DtypeLike], classes: Collection[str]) -> list[str]:
    """What names nothing in the model, and so changed nothing: most of it is misspelt."""
    notes: list[str] = []
    if special_dtypes:
        names = {alias for aliases in tensor_aliases(model, include_buffers=True).values() for alias in aliases}
        if unknown := [name for name in special_dtypes if name not in names]:
            notes.append(f"special_dtypes names tensors that the model does not have: {', '.join(unknown)}.")
    if classes:
        names = {type(module).__name__ for name, module in model.named_modules() if name}
        if unknown := sorted(set(classes) - names):
            notes.append(f"no_split_module_classes names classes that no module in the model has: {', '.join(unknown)}.")
    return notes


def split_dtype(
    dtype: DtypeLike | WeightFormat | None, weight_format: WeightFormat | str | None
) -> tuple[WeightFormat | None, DtypeLike | None]:
    """A packed format, and the dtype of the rest. Raises `PlanError` where two formats are named, and for what is neither."""
    packed = find_format(weight_format) if isinstance(weight_format, str) else weight_format
    if isinstance(dtype, WeightFormat) or (isinstance(dtype, str) and dtype in FORMAT_NAMES):
        if packed is not None:
            raise PlanError(f"dtype={dtype!r} and weight_format={weight_format!r} are both packed formats: give one of them.")
        return (find_format(dtype) if isinstance(dtype, str) else dtype), None
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return packed, None
    try:
        as_dtype(dtype)
    except PlanError as error:
        formats = ", ".join(map(repr, FORMAT_NAMES))
        raise PlanError(f"dtype={dtype!r} is neither a dtype, such as 'bfloat16', nor a packed format ({formats}).") from error
    return packed, dtype


def buildable_dtype(dtype: DtypeLike | None) -> torch.dtype | None:
    """The dtype, if a model of transformers can be built in it: then what its class keeps in float32 stays so."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1 else None
