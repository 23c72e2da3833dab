"""Stacks of expert matrices, one parameter (experts, …, …) for all of them: which can be packed and unpacked matrix by matrix."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Hashable, Iterator
from typing import cast

from torch import nn

from ..planning import Recorded

__all__ = ["is_stack", "stacks_of", "why_left"]


def stacks_of(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating parameters (experts, …, …) that the module `name` holds itself, by their names there.

    A module says how many experts it has (`num_experts`). Of one that is known from a checkpoint's headers alone, what is called experts
    and has three dimensions is taken for them.
    """
    found = {key: each for key, each in module._parameters.items() if each is not None and each.dim() == 3 and each.is_floating_point()}
    if not found or (isinstance(module, Recorded) and "experts" in name.split(".")):
        return found
    count = getattr(module, "num_experts", None)
    return {key: each for key, each in found.items() if each.shape[0] == count}


def is_stack(name: str, module: nn.Module) -> bool:
    """Whether the module holds one matrix for each of its experts in a single parameter."""
    return bool(stacks_of(name, module))


def why_left(module: nn.Module, parent: nn.Module, key: str) -> str | None:
    """Why the stack `key` of a module has to stay unpacked; None where all code that is known to read it takes single matrices by index.

    The code is that of the module's class and of its parent's. A module that is known from headers alone has none: its stacks are taken
    for such as can be packed.
    """
    if isinstance(module, Recorded):
        return None
    for reader in (module, parent):
        whole = _read_whole(cast(Hashable, type(reader)))
        if whole is None:
            return f"it is a stack of matrices, and the code of {type(reader).__name__}, which may read it, is not to be had"
        if key in whole:
            return f"it is a stack of matrices that {type(reader).__name__} computes with as a whole"
    return None


@functools.cache
def _read_whole(kind: Hashable) -> frozenset[str] | None:
    """Names of attributes that the code of a class reads, or may read, in another way than by an index; None where it has no source."""
    found: set[str] = set()
    assert isinstance(kind, type)
    for each in kind.__mro__:
        if each is nn.Module:
            break
        try:
            source = inspect.getsource(each)
        except (OSError, TypeError):
            return None
        tree = ast.parse(textwrap.dedent(source))
        for function in _functions(tree):
            found |= _whole_reads(function)
    return frozenset(found)


def _functions(tree: ast.Module) -> Iterator[ast.AST]:
    """The functions of a class; `__init__` makes parameters and computes nothing with them."""
    for statement in tree.body:
        body = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        yield from (each for each in body if not (isinstance(each, ast.FunctionDef) and each.name == "__init__"))


def _whole_reads(function: ast.AST) -> set[str]:
    by_index = {
        id(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not isinstance(node.slice, ast.Slice | ast.Tuple)
    }
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and id(node) not in by_index:
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # getattr(self, "gate_up_proj")
    return found
