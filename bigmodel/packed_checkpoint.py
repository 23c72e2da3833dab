"""Checkpoints that hold packed weights: packed layers and stacks take the places of the model's own, on meta, to be filled as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from .errors import MatchError, QuantizationError
from .loading import Checkpoint, Computed, Entry, KeyRules, SameNames, Source, Whole, read_tensors
from .modules import owner_of
from .protocols import TensorSpec
from .quantization import (
    Description,
    FourBit,
    Int8,
    PackedEmbedding,
    PackedLinear,
    PackedStack,
    PackedWeight,
    Places,
    Scheme,
    StoredWeight,
    attach,
    described,
    is_linear,
    matrix_shape,
    packed_layer,
    packed_table,
    plain_forward,
    stacks_of,
    why_left,
)

__all__ = ["Filled", "fill_places"]


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
    keys = _PackedKeys(filling.inner, filling.companions, frozenset(filling.consumed))
    used = scheme or filling.schemes[0]
    return Filled(keys, used, frozenset(filling.packed), filling.unpacking, filling.dtypes, filling.undo)


class _Filling:
    """Layers and stacks on their way into a model."""

    def __init__(self, model: nn.Module, inner: KeyRules, checkpoint: Checkpoint, scheme: Scheme | None) -> None:
        self.model, self.inner, self.checkpoint, self.scheme = model, inner, checkpoint, scheme
        self.companions: dict[str, Source] = {}
        self.consumed: set[str] = set()
        self.packed: set[str] = set()
        self.schemes: list[Scheme] = []
        self.unpacking: dict[str, PackedWeight] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._descriptions: dict[str, Description] = {}
        self._places = Places(model)
        self._replaced: list[tuple[nn.Module, nn.Module]] = []
        self._detach: list[Callable[[], None]] = []

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
                f"{each.weight} is packed, and {target} belongs to a {type(owner).__name__}: only linear layers, embeddings and stacks of "
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
            prefix, placed = self._put_stack(owner, target, key, each, own, original)
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

    def _put_stack(
        self, owner: nn.Module, target: str, key: str, each: StoredWeight, own: Scheme, original: torch.dtype
    ) -> tuple[str, PackedStack]:
        module, _, _ = target.rpartition(".")
        parent = self.model.get_submodule(module.rpartition(".")[0])
        reason = why_left(owner, parent, key)
        if reason is not None:
            raise QuantizationError(f"{each.weight} is packed, and {target} cannot be used so: {reason}.")
        parameter = owner._parameters[key]
        assert parameter is not None
        stack = PackedStack(tuple(parameter.shape), own.format, original)
        self._detach.append(attach(owner, key, stack))
        self.unpacking[target], self.dtypes[target] = stack, parameter.dtype
        self.companions[f"{target}.weight"] = Whole(each.weight)
        self.consumed.add(each.weight)
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
    packing: FourBit | Int8 = Int8() if description is None else FourBit(description.quant_type, description.double_quant, entry.dtype)
    if scheme is None:
        return Scheme(packing)
    if type(scheme.format) is not type(packing):
        raise QuantizationError(
            f"{each.weight} is packed as {packing.name}, and the config asks for {scheme.format.name}: load it without a config, or load "
            "the original checkpoint with it."
        )
    return replace(scheme, format=packing)


def _constant(value: float, entry: str, specs: Mapping[str, TensorSpec]) -> Computed:
    """A number as a tensor. (A source reads something; this one reads the few bytes of the description that the number comes from.)"""
    shape = specs["nested_offset"].shape
    return Computed((Whole(entry),), lambda _: torch.full(shape, value, dtype=torch.float32), shape, torch.float32)
