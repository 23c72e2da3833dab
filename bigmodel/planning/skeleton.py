"""A model tree made from the names and shapes of its tensors alone, so that a checkpoint can be planned without its code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..protocols import TensorSpec

__all__ = ["skeleton"]


def skeleton(specs: Mapping[str, TensorSpec]) -> nn.Module:
    """Modules nested as the dotted names say, with parameters on meta; children named 0, 1, 2 … become a `ModuleList`.

    So blocks are found in it. It has no `forward`: it is there to be sized and planned.
    """
    tree: dict[str, object] = {}
    for name, spec in specs.items():
        *path, leaf = name.split(".")
        branch = tree
        for part in path:
            below = branch.setdefault(part, {})
            if not isinstance(below, dict):  # "a" and "a.b" are both tensors: keep the longer name in one piece
                leaf = ".".join([part, leaf])
                continue
            branch = below
        branch[leaf] = spec
    return _module(tree)


def _module(tree: Mapping[str, object]) -> nn.Module:
    children = {name: _module(below) for name, below in tree.items() if isinstance(below, dict)}
    tensors = {name: spec for name, spec in tree.items() if isinstance(spec, TensorSpec)}
    indices = sorted(int(name) for name in children if name.isdigit())
    if children and not tensors and indices == list(range(len(children))):
        return nn.ModuleList([children[str(index)] for index in indices])
    module = nn.Module()
    for name, spec in tensors.items():
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        module.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))
    for name, child in children.items():
        module.add_module(name, child)
    return module
