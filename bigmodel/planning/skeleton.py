"""A model tree made from the names and shapes of its tensors alone, so that a checkpoint can be planned without its code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..collecting import without_collecting
from ..errors import PlanError
from ..protocols import TensorSpec

__all__ = ["Recorded", "skeleton"]

_EMBEDDING_NAME = re.compile(r"embed|wte$|wpe$|^shared$", re.IGNORECASE)
"""Last part of the names that embeddings go by: embed_tokens, word_embeddings, tok_embeddings, wte, …"""


MAX_DEPTH = 100
"""Modules inside each other. Models have about ten; thousands, in the headers of a stranger, are more than Python can walk."""


class Recorded(nn.Module):
    """A module of which only the names and shapes of its tensors are known."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise PlanError("This model was made of the names and shapes in a checkpoint, to be planned: it cannot run. Load it with its code.")


def skeleton(specs: Mapping[str, TensorSpec]) -> nn.Module:
    """Modules nested as the dotted names say, with parameters on meta; children named 0, 1, 2 … become a `ModuleList`.

    So blocks are found in it. What holds a two-dimensional floating `weight` and nothing else but perhaps a `bias` of as many rows becomes
    an `nn.Linear`; without a bias, and where its name says so (embed_tokens, wte, …), an `nn.Embedding`: packed formats and embeddings that
    are read by rows are then planned as for the model itself. Everything else is `Recorded`. It has no `forward` that works: it is there
    to be sized and planned. Raises `PlanError` for names of more than `MAX_DEPTH` parts.
    """
    for name in specs:
        if name.count(".") > MAX_DEPTH:
            raise PlanError(
                f"The tensor {name[:60]!r}… lies in {name.count('.'):,} modules inside each other, and at most "
                f"{MAX_DEPTH} can be planned: these are no names of a model's tensors."
            )
    with without_collecting():
        return _Maker().module("", _tree(specs))


def _tree(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Nested dicts, one a module, with the specs of its tensors."""
    branches: dict[str, dict[str, Any]] = {"": {}}

    def branch(path: str) -> dict[str, Any] | None:
        """The dict of the module `path`; None where a tensor has that name, or that of a module above it."""
        found = branches.get(path)
        if found is None:
            parent, _, key = path.rpartition(".")
            above = branch(parent)
            below = None if above is None else above.setdefault(key, {})
            if isinstance(below, dict):
                found = branches[path] = below
        return found

    for name, spec in specs.items():
        path, _, leaf = name.rpartition(".")
        holder = branch(path)
        while holder is None:  # "a" and "a.b" are both tensors: what is left of the longer name stays in one piece
            path, _, last = path.rpartition(".")
            leaf = f"{last}.{leaf}"
            holder = branch(path)
        if leaf in holder and isinstance(holder[leaf], dict):
            leaf = f"{leaf}."
        holder[leaf] = spec
    return branches[""]


class _Maker:
    """Makes modules without running their `__init__`, which would take most of the time of planning a model of many modules.

    Nobody hooks them, so that they share the empty tables of hooks.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._blank = dict(nn.Module().__dict__)

    def module(self, name: str, tree: Mapping[str, Any]) -> nn.Module:
        tensors: dict[str, TensorSpec] = {}
        children: dict[str, nn.Module] = {}
        for key, below in tree.items():
            if isinstance(below, dict):
                children[key] = self.module(key, below)
            else:
                tensors[key] = below
        if children and not tensors and "0" in children and all(map(str.isdigit, children)):
            indices = sorted(map(int, children))
            if indices == list(range(len(children))):
                return self._made(nn.ModuleList, {}, {}, {str(index): children[str(index)] for index in indices})
        made, attributes = _kind(name, tensors) if tensors and not children else (Recorded, {})
        parameters: dict[str, nn.Parameter | None] = {"weight": None, "bias": None} if made is nn.Linear else {}
        for key, spec in tensors.items():
            attribute = key.replace(".", "_")
            while "." in key and (attribute in tensors or attribute in parameters or attribute in children):
                attribute += "_"
            parameters[attribute] = self._parameter(spec)
        return self._made(made, attributes, parameters, children)

    def _made(
        self,
        kind: type[nn.Module],
        attributes: Mapping[str, object],
        parameters: dict[str, nn.Parameter | None],
        children: dict[str, nn.Module],
    ) -> nn.Module:
        module: nn.Module = kind.__new__(kind)
        vars(module).update(  # assigning __dict__ would go through nn.Module.__setattr__, which takes several times as long
            self._blank,
            **attributes,
            _parameters=parameters,
            _buffers={},
            _non_persistent_buffers_set=set(),
            _modules=children,
        )
        return module

    def _parameter(self, spec: TensorSpec) -> nn.Parameter:
        key = (tuple(spec.shape), spec.dtype)
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        made: nn.Parameter = torch.Tensor._make_subclass(nn.Parameter, tensor, False)
        return made


def _kind(name: str, tensors: Mapping[str, TensorSpec]) -> tuple[type[nn.Module], dict[str, object]]:
    """The class that a leaf module seems to have, and the attributes that its `__init__` would have set."""
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or len(weight.shape) != 2 or not weight.dtype.is_floating_point or len(tensors) > 1 + (bias is not None):
        return Recorded, {}
    rows, columns = weight.shape
    if bias is None and _EMBEDDING_NAME.search(name):
        return nn.Embedding, {
            "num_embeddings": rows,
            "embedding_dim": columns,
            "padding_idx": None,
            "max_norm": None,
            "norm_type": 2.0,
            "scale_grad_by_freq": False,
            "sparse": False,
        }
    if bias is None or tuple(bias.shape) == (rows,):
        return nn.Linear, {"in_features": columns, "out_features": rows}
    return Recorded, {}
