"""Which layers of a model are packed, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import QuantizationError
from ..modules import find_blocks
from ..text import listed
from .matrices import is_linear, plain_forward
from .stacks import stacks_of, why_left

__all__ = ["Selection", "keep_list", "select"]

READS_WEIGHTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules of torch whose own forward computes with their children's weights, past the children's forward."""


@dataclass(slots=True)
class Selection:
    """The linear layers and the stacks of expert matrices of a model, sorted."""

    packed: dict[str, nn.Module] = field(default_factory=dict)
    """By every full name: a layer that stands in several places appears under each of them."""
    stacks: dict[str, nn.Parameter] = field(default_factory=dict)
    """Stacks of matrices that are packed, by every full name."""
    tables: dict[str, nn.Embedding] = field(default_factory=dict)
    """Embeddings that are packed, by every full name."""
    left: dict[str, str] = field(default_factory=dict)
    """Full name → why the layer, or the module that holds a stack, is left as it is."""


_ASKED: Final = "it is the output head, tied, or was asked to be left"
_IN_FULL: Final = "its model's class wants it in float32"


class _Node(NamedTuple):
    name: str
    module: nn.Module
    parent: nn.Module


def select(
    model: nn.Module,
    skip_modules: Collection[str] | None = None,
    kept: Collection[str] = (),
    takes_table: Callable[[tuple[int, int]], bool] | None = None,
) -> Selection:
    """Sorts the linear layers and stacks of matrices below `model` into those that are packed and those that are left as they are.

    `skip_modules` and `kept` name modules, with all below them: by full name, or by a run of components of it (`"q_proj"`, `"layers.1"`,
    which is not `layers.10`). With None the output head and tied weights are skipped (`keep_list`), by full name. Linear layers are
    `nn.Linear` and transformers' `Conv1D`. What a model's class wants in float32 (`_keep_in_fp32_modules`) is left, and so are subclasses
    with a forward of their own, and whatever torch's own modules compute with past the layer's forward. A stack is packed if all code
    that reads it takes single matrices of it by index. `takes_table` tells of which shapes embedding tables are packed; without it, none
    are asked for.

    Raises `QuantizationError` where embedding tables are asked for and one of them is tied to another module.
    """
    nodes = _nodes(model)
    tied = _tied(nodes)
    in_full = _in_full(model, nodes)
    whole = set(_keep_list(model, nodes, tied)) if skip_modules is None else set()
    names = {*listed(skip_modules), *listed(kept), *in_full}
    last_parts = {name.rpartition(".")[2] for name in names}
    found = Selection()
    skipped: set[str] = set()
    for name, module, parent in nodes:
        above, _, last = name.rpartition(".")
        if above in skipped or name in whole or (last in last_parts and _ends_with(name, names)):
            skipped.add(name)
        if not module._parameters:
            continue
        if takes_table is not None and isinstance(module, nn.Embedding):
            is_tied = id(module.weight) in tied
            by_default = skip_modules is None and is_tied and not _ends_with(name, kept)
            if name in skipped and not by_default:
                reason: str | None = _ASKED
            elif is_tied:
                raise QuantizationError(_tied_table(name, module, nodes))
            else:
                reason = _why_table_left(module, takes_table)
            if reason is None:
                found.tables[name] = module
            else:
                found.left[name] = reason
            continue
        if not is_linear(module):
            for key, stack in stacks_of(name, module).items():
                full = f"{name}.{key}"
                reason = _ASKED if name in skipped or _ends_with(full, names) else _why_stack_left(module, parent, key, tied)
                if reason is None:
                    found.stacks[full] = stack
                else:
                    found.left[name] = reason
            continue
        reason = _why_left(module, parent, tied) if name not in skipped else _IN_FULL if _is_named(name, in_full) else _ASKED
        if reason is None:
            found.packed[name] = module
        else:
            found.left[name] = reason
    return found


def _nodes(model: nn.Module) -> list[_Node]:
    """All modules below `model` under all of their names, parents first, in order."""
    nodes: list[_Node] = []
    stack = [_Node(name, child, model) for name, child in reversed(model._modules.items()) if child is not None]
    while stack:
        node = stack.pop()
        nodes.append(node)
        if node.module._modules:
            below = reversed(node.module._modules.items())
            stack += [_Node(f"{node.name}.{key}", child, node.module) for key, child in below if child is not None]
    return nodes


def _in_full(model: nn.Module, nodes: Iterable[_Node]) -> set[str]:
    """Names that classes of transformers keep in float32: their code casts to the dtype of these weights, packed bytes it would be."""
    classes = {type(model), *(type(module) for _, module, _ in nodes)}
    found: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        found.update(*(getattr(each, attribute, None) or () for each in classes))
    return found


def _tied(nodes: Iterable[_Node]) -> set[int]:
    """Identities of the parameters that several modules hold; a module that stands in several places ties nothing."""
    owners: dict[int, int] = {}
    tied: set[int] = set()
    for _, module, _ in nodes:
        for parameter in module._parameters.values():
            if parameter is not None and owners.setdefault(id(parameter), id(module)) != id(module):
                tied.add(id(parameter))
    return tied


def _ends_with(path: str, names: Collection[str]) -> bool:
    """Whether a run of components that ends the path is one of the names."""
    while path:
        if path in names:
            return True
        path = path.partition(".")[2]
    return False


def _is_named(path: str, names: Collection[str]) -> bool:
    """Whether one of the names is a run of components of the path."""
    return any(f".{name}." in f".{path}." for name in names)


def _why_left(module: nn.Module, parent: nn.Module, tied: Collection[int]) -> str | None:
    if isinstance(module, NonDynamicallyQuantizableLinear) or isinstance(parent, READS_WEIGHTS):
        return f"{type(parent).__name__} computes with its weight directly"
    if not plain_forward(module):
        return f"{type(module).__name__} has a forward of its own"
    weight = module._parameters["weight"]
    assert weight is not None
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype} already"
    if id(weight) in tied:
        return "its weight is tied to another module's"
    return None


def _why_stack_left(module: nn.Module, parent: nn.Module, key: str, tied: Collection[int]) -> str | None:
    return "its weight is tied to another module's" if id(module._parameters[key]) in tied else why_left(module, parent, key)


def _why_table_left(module: nn.Embedding, takes_table: Callable[[tuple[int, int]], bool]) -> str | None:
    if type(module).forward is not nn.Embedding.forward:
        return f"{type(module).__name__} has a forward of its own"
    if module.max_norm is not None:
        return "its forward rewrites its rows (max_norm)"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype} already"
    rows, columns = module.weight.shape
    return None if takes_table((rows, columns)) else f"no single rows can be unpacked of its shape [{rows}, {columns}]"


def _tied_table(name: str, module: nn.Embedding, nodes: Iterable[_Node]) -> str:
    others = [
        each for each, holder, _ in nodes if holder is not module and any(own is module.weight for own in holder._parameters.values())
    ]
    return (
        f"The embedding {name!r} is to be packed (pack_embeddings), and its weight is tied to that of {', '.join(map(repr, others))}. "
        f"Leave it unpacked, by name (skip_modules=[{name!r}, …]) or with pack_embeddings=False, or untie them."
    )


def keep_list(model: nn.Module) -> list[str]:
    """Names of the modules that are better left as they are: those whose weights are tied to other modules', and the output head.

    The head is what the model itself calls so (`get_output_embeddings` of transformers' models), and the last child, if that holds linear
    layers but no block; without either, the last child that is a linear layer. A base model of transformers has no head.
    """
    nodes = _nodes(model)
    return _keep_list(model, nodes, _tied(nodes))


def _keep_list(model: nn.Module, nodes: Sequence[_Node], tied: Collection[int]) -> list[str]:
    owners = [name for name, module, _ in nodes if tied and any(id(each) in tied for each in module._parameters.values())]
    return list(dict.fromkeys([*owners, *_heads(model, nodes)]))


def _heads(model: nn.Module, nodes: Sequence[_Node]) -> list[str]:
    prefix = getattr(model, "base_model_prefix", None)
    if isinstance(prefix, str) and not hasattr(model, prefix):
        return []
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    heads = [name for name, module, _ in nodes if module is head]
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    if children and _is_head(model, *children[-1]):
        heads.append(children[-1][0])
    return heads or [name for name, child in children if is_linear(child)][-1:]


def _is_head(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a child holds linear layers, and no block."""
    if is_linear(module):
        return True
    has_layers = any(is_linear(each) for each in module.modules())
    return has_layers and not any(f"{block}.".startswith(f"{name}.") for block in find_blocks(model))
