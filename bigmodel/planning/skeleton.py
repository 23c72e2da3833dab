"""A model tree made from the names and shapes of its tensors alone, so that a checkpoint can be planned without its code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..protocols import TensorSpec

__all__ = ["Recorded", "skeleton"]

_EMBEDDING_NAME = re.compile(r"embed|wte$|wpe$|^shared$", re.IGNORECASE)
"""Last part of the names that embeddings go by: embed_tokens, word_embeddings, tok_embeddings, wte, …"""


class Recorded(nn.Module):
    """A module of which only the names and shapes of its tensors are known."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise PlanError("This model was made of the names and shapes in a checkpoint, to be planned: it cannot run. Load it with its code.")


def skeleton(specs: Mapping[str, TensorSpec]) -> nn.Module:
    """Modules nested as the dotted names say, with parameters on meta; children named 0, 1, 2 … become a `ModuleList`.

    So blocks are found in it. What holds a two-dimensional floating `weight` and nothing else but perhaps a `bias` of as many rows becomes
    an `nn.Linear`; without a bias, and where its name says so (embed_tokens, wte, …), an `nn.Embedding`: packed formats and embeddings that
    are read by rows are then planned as for the model itself. Everything else is `Recorded`. It has no `forward` that works: it is there
    to be sized and planned.
    """
    tree: dict[str, Any] = {}
    branches: dict[str, dict[str, Any]] = {"": tree}
    for name, spec in specs.items():
        path, _, leaf = name.rpartition(".")
        branch = branches.get(path)
        if branch is None:
            branch, kept = _branch(tree, path)
            if kept:
                leaf = ".".join([*kept, leaf])
            else:
                branches[path] = branch
        branch[leaf] = spec
    return _Maker().module("", tree)


def _branch(tree: dict[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The dict for the module `path`, and what of the path has to stay in the tensor's name: where "a" and "a.b" are both tensors."""
    kept: list[str] = []
    for part in path.split("."):
        below = tree.setdefault(part, {})
        if isinstance(below, dict):
            tree = below
        else:
            kept.append(part)
    return tree, kept


class _Maker:
    """Makes modules without running their `__init__`, which would take most of the time of planning a model of many modules."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._blank = {key: value for key, value in nn.Module().__dict__.items() if not isinstance(value, dict | set)}
        self._tables = {key: type(value) for key, value in nn.Module().__dict__.items() if isinstance(value, dict | set)}

    def module(self, name: str, tree: Mapping[str, Any]) -> nn.Module:
        tensors = {key: below for key, below in tree.items() if not isinstance(below, dict)}
        children = {key: self.module(key, below) for key, below in tree.items() if isinstance(below, dict)}
        if children and not tensors and all(map(str.isdigit, children)):
            indices = sorted(map(int, children))
            if indices == list(range(len(children))):
                return nn.ModuleList([children[str(index)] for index in indices])
        made, attributes = _kind(name, tensors) if tensors and not children else (Recorded, {})
        module: nn.Module = made.__new__(made)
        module.__dict__.update(self._blank)
        for table, kind in self._tables.items():
            module.__dict__[table] = kind()
        module.__dict__.update(attributes)
        module._modules.update(children)
        if made is nn.Linear:
            module._parameters.update(weight=None, bias=None)
        for key, spec in tensors.items():
            module._parameters[key.replace(".", "_")] = self._parameter(spec)
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
