"""Checkpoints that hold packed weights: packed layers and stacks take the places of the model's own, on meta, to be filled as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from .errors import MatchError, QuantizationError
from .loading import (
    Checkpoint,
    Computed,
    Concatenate,
    Entry,
    KeyRules,
    SameNames,
    Source,
    Stack,
    Whole,
    lower,
    read_tensors,
    refuse_others_said,
)
from .modules import owner_of
from .protocols import TensorSpec
from .quantization import (
    Description,
    FourBit,
    Int8,
    PackedEmbedding,
    PackedFormat,
    PackedLinear,
    PackedStack,
    PackedWeight,
    Places,
    Scheme,
    StoredWeight,
    attach,
    chosen_by,
    described,
    is_linear,
    matrix_shape,
    packed_layer,
    packed_table,
    plain_forward,
    stacks_of,
    why_left,
)
from .text import kind_text

__all__ = ["Filled", "fill_places", "keep_places"]

BITSANDBYTES: Final = "bitsandbytes"
"""What configurations call it."""


@dataclass(slots=True)
class Filled:
    """A model in which packed layers and stacks, on meta, have taken the places of its own."""

    rules: KeyRules
    """What fills them, and the rest of the model."""
    scheme: Scheme
    packed: frozenset[str]
    """Full names of packed tensors, which keep their dtypes."""
    unpacking: dict[str, PackedWeight]
    """Stacks and embeddings, which unpack to a dtype of their own, by full name of the parameter that they have taken the place of."""
    dtypes: dict[str, torch.dtype]
    """Of these parameters."""
    undo: Callable[[], None]
    """Puts the model's own back."""


def fill_places(
    model: nn.Module, checkpoint: Checkpoint, stored: list[StoredWeight], scheme: Scheme | None, rules: KeyRules | None
) -> Filled:
    """Replaces what `stored` packed weights belong to.

    Raises `QuantizationError` for weights that are packed in another format than `scheme` asks for, or that nothing can compute with,
    and `MatchError` for shapes that do not fit. The model is as it was then.
    """
    filling = _Filling(model, rules or SameNames(), checkpoint, scheme)
    try:
        for each, target in filling.targets(stored):
            filling.put(each, target)
    except BaseException:
        filling.undo()
        raise
    if not filling.schemes:
        raise MatchError(f"{checkpoint.location} holds {len(stored)} packed weights, and none of them has a place in the model.")
    return filling.result()


def keep_places(model: nn.Module, checkpoint: Checkpoint, scheme: Scheme, rules: KeyRules | None) -> Filled | None:
    """The same for a checkpoint that says nothing of being packed, and is in the format of `scheme`: what that packs is kept as it is.

    Experts that are single matrices in the checkpoint are stacked packed, where their scales allow it. Everything else is loaded as the
    values that it stands for. None where nothing can be kept. Raises what `fill_places` raises.
    """
    stored = {each.weight: each for each in scheme.format.stored(checkpoint.entries)}  # type: ignore[arg-type]
    if not stored:
        return None
    chosen = chosen_by(scheme.format, model)
    names = {*(f"{name}.weight" for name in chosen.packed), *chosen.stacks}
    filling = _Filling(model, rules or SameNames(), checkpoint, scheme)
    try:
        filling.keep(stored, names)
    except BaseException:
        filling.undo()
        raise
    return filling.result() if filling.schemes else None


class _Filling:
    """Layers and stacks on their way into a model."""

    def __init__(self, model: nn.Module, inner: KeyRules, checkpoint: Checkpoint, scheme: Scheme | None) -> None:
        self.model, self.inner, self.checkpoint, self.scheme = model, inner, checkpoint, scheme
        self.companions: dict[str, Source] = {}
        self.consumed: set[str] = set()
        self.scales: set[str] = set()
        self.packed: set[str] = set()
        self.schemes: list[Scheme] = []
        self.unpacking: dict[str, PackedWeight] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._descriptions: dict[str, Description] = {}
        self._places = Places(model)
        self._replaced: list[tuple[nn.Module, nn.Module]] = []
        self._detach: list[Callable[[], None]] = []

    def result(self) -> Filled:
        """The filled model, and what fills it."""
        used = self.scheme or self.schemes[0]
        keys = _PackedKeys(self.inner, self.companions, frozenset(self.consumed), frozenset(self.scales))
        return Filled(keys, used, frozenset(self.packed), self.unpacking, self.dtypes, self.undo)

    def keep(self, stored: Mapping[str, StoredWeight], names: Collection[str]) -> None:
        """Puts layers and stacks into the places of those of the tensors `names` that stored weights fill as they are."""
        entries = self.checkpoint.entries
        specs = _specs(self.model)
        sources, _ = self.inner.sources({name: entries[name] for name in stored}, specs)
        for target, source in sources.items():
            leaves = _leaves(source)
            if target not in names or leaves is None or not all(name in stored for name in leaves):
                continue
            owner, key = owner_of(self.model, target)
            packing = stored[leaves[0]].packing
            assert packing is not None  # it is the scheme's own
            assert self.scheme is not None
            found = {"weight": source} | {
                attribute: _renamed(source, {name: stored[name].companions[attribute] for name in leaves})
                for attribute in stored[leaves[0]].companions
            }
            wanted = packing.tensors(specs[target].shape)
            if not _joins(source, entries, target, packing) or any(
                lower(found[attribute], entries, target, spec.dtype).shape != spec.shape for attribute, spec in wanted.items()
            ):
                continue
            own, dtype = replace(self.scheme, format=packing), specs[target].dtype
            placed: PackedWeight
            if is_linear(owner):
                prefix, placed = self._put_layer(owner, target, own, dtype)
            else:
                prefix, placed = self._put_stack(owner, target, key, own, dtype)
            self.unpacking[target], self.dtypes[target] = placed, dtype
            self.companions |= {prefix + attribute: each for attribute, each in found.items()}
            self.packed |= {prefix + attribute for attribute in found}
            self.scales |= {name for leaf in leaves for name in stored[leaf].beside()}
            self.consumed |= {*leaves, *self.scales}
            self.schemes.append(own)

    def targets(self, stored: list[StoredWeight]) -> list[tuple[StoredWeight, str]]:
        """The weights that the model has a place for, and the full name of each there; the match tells of the others."""
        self._descriptions = _descriptions(self.checkpoint, stored)
        entries = self.checkpoint.entries
        found, _ = self.inner.sources({each.weight: entries[each.weight] for each in stored}, _specs(self.model))
        names = {source.name: target for target, source in found.items() if isinstance(source, Whole)}
        return [(each, names[each.weight]) for each in stored if each.weight in names]

    def put(self, each: StoredWeight, target: str) -> None:
        """Puts the layer or stack of one weight into its place."""
        owner, key = owner_of(self.model, target)
        entry, description = self.checkpoint.entries[each.weight], self._descriptions.get(each.weight)
        is_table = isinstance(owner, nn.Embedding) and type(owner).forward is nn.Embedding.forward
        if not (is_table or (is_linear(owner) and plain_forward(owner))) and key not in stacks_of(target.rpartition(".")[0], owner):
            raise QuantizationError(
                f"{each.weight} is packed, and {target} belongs to {kind_text(owner)}: only linear layers, embeddings and stacks of "
                "expert matrices can be."
            )
        own = _scheme_of_stored(each, entry, description, self.scheme)
        shape = entry.shape if description is None else description.shape
        expected = matrix_shape(owner) if is_linear(owner) else tuple(owner._parameters[key].shape)  # type: ignore[union-attr]
        if shape != expected:
            raise MatchError(f"{each.weight} was packed from shape {list(shape)}; the model has {list(expected)} in {target}.")
        original = torch.float16 if description is None else description.dtype
        placed: PackedWeight
        if is_linear(owner):
            prefix, placed = self._put_layer(owner, target, own, original)
        elif isinstance(owner, nn.Embedding):
            prefix, placed = self._put_table(owner, target, own, original)
        else:
            prefix, placed = self._put_stack(owner, target, key, own, original)
            self.companions[f"{target}.weight"] = Whole(each.weight)
            self.consumed.add(each.weight)
        self.companions |= {prefix + attribute: Whole(name) for attribute, name in each.companions.items()}
        if description is not None and description.nested_offset is not None:
            self.companions[f"{prefix}nested_offset"] = _constant(description.nested_offset, each.description or "", placed.specs())
            placed.nested_offset_value = description.nested_offset
        self.packed |= {prefix + attribute for attribute in own.format.tensors((1, 1))}
        self.consumed |= set(each.beside())
        self.schemes.append(own)

    def _put_layer(self, linear: nn.Module, target: str, own: Scheme, original: torch.dtype) -> tuple[str, PackedLinear]:
        layer = packed_layer(linear, own, original)
        self._places.put(linear, layer)
        self._replaced.append((linear, layer))
        return target.removesuffix("weight"), layer

    def _put_table(self, embedding: nn.Embedding, target: str, own: Scheme, original: torch.dtype) -> tuple[str, PackedEmbedding]:
        table = packed_table(embedding, own.format, original)
        self._places.put(embedding, table)
        self._replaced.append((embedding, table))
        self.unpacking[target], self.dtypes[target] = table, embedding.weight.dtype
        return target.removesuffix("weight"), table

    def _put_stack(self, owner: nn.Module, target: str, key: str, own: Scheme, original: torch.dtype) -> tuple[str, PackedStack]:
        module, _, _ = target.rpartition(".")
        parent = self.model.get_submodule(module.rpartition(".")[0])
        reason = why_left(owner, parent, key)
        if reason is not None:
            raise QuantizationError(f"{target} is packed in the checkpoint, and cannot be used so: {reason}.")
        parameter = owner._parameters[key]
        assert parameter is not None
        stack = PackedStack(tuple(parameter.shape), own.format, original)
        self._detach.append(attach(owner, key, stack))
        self.unpacking[target], self.dtypes[target] = stack, parameter.dtype
        return f"{target}.", stack

    def undo(self) -> None:
        """Puts the model's own layers and parameters back."""
        for detach in self._detach:
            detach()
        back = Places(self.model)
        for linear, layer in self._replaced:
            back.put(layer, linear)


@dataclass(frozen=True, slots=True)
class _PackedKeys:
    """Key rules for packed checkpoints: `inner` finds the weights, and their companions follow them."""

    inner: KeyRules
    companions: Mapping[str, Source]
    """Full name of a companion in the model → what fills it."""
    consumed: frozenset[str]
    """Names in the checkpoint that are no matter of `inner`."""
    kept_scales: frozenset[str]
    """See `bigmodel.loading.KeepsScales`."""

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """See `KeyRules.sources`."""
        others = {name: entry for name, entry in entries.items() if name not in self.consumed}
        wanted = {name: spec for name, spec in targets.items() if name not in self.companions}
        found, unused = self.inner.sources(others, wanted)
        return {**found, **self.companions}, unused


def _specs(model: nn.Module) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in model.named_parameters(remove_duplicate=False)}


def _descriptions(checkpoint: Checkpoint, stored: list[StoredWeight]) -> dict[str, Description]:
    """What the checkpoint says about its 4-bit weights, by the name of the weight there."""
    weights = {each.description: each.weight for each in stored if each.description is not None}
    return {weights[name]: described(weights[name], content) for name, content in read_tensors(checkpoint, weights).items()}


def _scheme_of_stored(each: StoredWeight, entry: Entry, description: Description | None, scheme: Scheme | None) -> Scheme:
    """The format of the packed bytes, with what `scheme` says about computing. Raises `QuantizationError` where it asks for other bits."""
    if description is not None:
        packing: PackedFormat = FourBit(description.quant_type, description.double_quant, entry.dtype)
    else:
        assert each.packing is not None  # what is stored without a description says what it is
        packing = each.packing
    _refuse_others_said(entry, packing)
    if scheme is None:
        return Scheme(packing)
    if type(scheme.format) is not type(packing):
        raise QuantizationError(
            f"{each.weight} is packed as {packing.name}, and the config asks for {scheme.format.name}: load it without a config, or load "
            "the original checkpoint with it."
        )
    return replace(scheme, format=packing)


def _refuse_others_said(entry: Entry, packing: PackedFormat) -> None:
    """Raises `CheckpointError` where a configuration beside the file says that bitsandbytes, or another, packed in another format."""
    if isinstance(packing, FourBit):
        refuse_others_said(entry, BITSANDBYTES, {"load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": packing.quant_type})
    elif isinstance(packing, Int8):
        refuse_others_said(entry, BITSANDBYTES, {"load_in_4bit": False, "load_in_8bit": True})


def _leaves(source: Source) -> list[str] | None:
    """The entries that a source puts side by side; None where it does something else."""
    if isinstance(source, Whole):
        return [source.name]
    if not isinstance(source, Stack | Concatenate):
        return None
    parts = [_leaves(part) for part in source.sources]
    return None if None in parts else [name for part in parts for name in part or ()]


def _renamed(source: Source, names: Mapping[str, str]) -> Source:
    """The same of other entries."""
    if isinstance(source, Whole):
        return Whole(names[source.name])
    assert isinstance(source, Stack | Concatenate)
    return replace(source, sources=tuple(_renamed(part, names) for part in source.sources))


def _joins(source: Source, entries: Mapping[str, Entry], target: str, packing: PackedFormat) -> bool:
    """Whether packed weights can be put together as `source` says: rows and columns are added where the format can."""
    if isinstance(source, Whole):
        return True
    assert isinstance(source, Stack | Concatenate)
    if not all(_joins(part, entries, target, packing) for part in source.sources):
        return False
    shapes = [lower(part, entries, target, torch.uint8).shape for part in source.sources]
    if isinstance(source, Stack):
        return source.dim == 0
    dim = source.dim % len(shapes[0])
    return dim < len(shapes[0]) - 2 or all(packing.joins(shape[dim]) for shape in shapes[:-1])


def _constant(value: float, entry: str, specs: Mapping[str, TensorSpec]) -> Computed:
    """A number as a tensor. (A source reads something; this one reads the few bytes of the description that the number comes from.)"""
    shape = specs["nested_offset"].shape
    return Computed((Whole(entry),), lambda _: torch.full(shape, value, dtype=torch.float32), shape, torch.float32)
