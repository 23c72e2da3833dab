"""Facts about module trees that planning, loading and dispatch all need: names of tensors, owners, ties, persistence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from .errors import PlanError

__all__ = [
    "READ_THEIR_CHILDREN",
    "class_names",
    "distinct_modules",
    "find_blocks",
    "find_tied_parameters",
    "get_non_persistent_buffers",
    "id_tensor_storage",
    "named_module_tensors",
    "owner_of",
    "reads_rows_only",
    "row_tables",
    "runs_itself",
    "tensor_aliases",
]

READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""torch modules that use the weights of their children without calling them: they are never cut."""


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor `name` directly, and the tensor's own name there. Raises AttributeError."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with their names; a tensor registered twice comes once. The module is not changed."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    skipped = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in skipped:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that are not part of the state dict: bare names, or with `fqns` their full names below `module`."""
    names: set[str] = set()
    for path, child in module.named_modules() if recurse else [("", module)]:
        prefix = f"{path}." if fqns and path else ""
        names |= {prefix + name for name in child._non_persistent_buffers_set}
    return names


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Device, address and bytes of the tensor's storage: equal for tensors that share memory. All of one size on meta are equal too."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def tensor_aliases(model: nn.Module, *, include_buffers: bool = False) -> dict[str, list[str]]:
    """For every distinct tensor, under its first name, all names under which the very same object is registered (first one included)."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    pairs: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
    if include_buffers:
        pairs += list(model.named_buffers(remove_duplicate=False))
    for name, tensor in pairs:
        aliases.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return aliases


def find_tied_parameters(model: nn.Module, **kwargs: object) -> list[list[str]]:
    """Groups of names that share one parameter object, each sorted, in the order of the model; `[]` without ties.

    Only identity counts: two parameters that share memory but are different objects are not tied.
    """
    return [sorted(names) for names in tensor_aliases(model).values() if len(names) > 1]


def class_names(no_split_module_classes: str | Collection[str] | None) -> frozenset[str]:
    """The class names of blocks as a set; a single name may be a plain string. Raises `PlanError` for what is no name."""
    if no_split_module_classes is None:
        return frozenset()
    if isinstance(no_split_module_classes, str):
        return frozenset([no_split_module_classes])
    for name in no_split_module_classes:
        if not isinstance(name, str):
            raise PlanError(f"no_split_module_classes holds {name!r}. Give names of classes, such as 'LlamaDecoderLayer'.")
    return frozenset(no_split_module_classes)


def find_blocks(model: nn.Module, no_split_module_classes: str | Collection[str] | None = None) -> list[str]:
    """Names of the modules that are never split across devices, outermost only, in the order of the model.

    Blocks are the modules of the classes named in `no_split_module_classes`; without these, of those in the model's own
    `_no_split_modules` (transformers); without these, or where the model holds none of them, the repeated children of its `ModuleList`s.
    Where lists are nested, the outer one holds the blocks if its children are alike and more than lists (layers of experts, which a
    residual runs around); else the longer one (stages of layers).
    """
    classes = class_names(no_split_module_classes or getattr(model, "_no_split_modules", None))
    if classes:
        found = _outermost(model, lambda module: type(module).__name__ in classes)
        if found or no_split_module_classes:
            return found
    return _repeated_children(model, "")[0]


def _outermost(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> list[str]:
    found: list[str] = []
    stack = list(reversed(_children(model, "")))
    while stack:
        name, module = stack.pop()
        if is_block(module):
            found.append(name)
        elif module._modules:
            stack += reversed(_children(module, name))
    return found


def _children(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The distinct children with their full names."""
    prefix = f"{name}." if name else ""
    children = [(prefix + key, child) for key, child in module._modules.items() if child is not None]
    if len({id(child) for _, child in children}) < len(children):
        children = [(prefix + key, child) for key, child in module.named_children()]
    return children


def _repeated_children(module: nn.Module, name: str) -> tuple[list[str], int]:
    """Blocks below `module`, and the length of the longest list that they come from (0 without blocks)."""
    children = _children(module, name)
    below = [_repeated_children(child, child_name) for child_name, child in children if _may_hold_blocks(child)]
    longest = max([length for _, length in below], default=0)
    if isinstance(module, nn.ModuleList) and children:
        kinds = len({type(child) for _, child in children})
        repeats = kinds == 1 or 2 * kinds <= len(children)  # in hybrid models layers of several classes take turns
        is_list = repeats and any(True for _ in module.parameters())
        if is_list and (len(children) >= longest or (len(children) > 1 and _are_layers([child for _, child in children]))):
            return [child_name for child_name, _ in children], len(children)
    return [block for blocks, _ in below for block in blocks], longest


def _may_hold_blocks(module: nn.Module) -> bool:
    """Whether there is a `ModuleList` in the module, or something below its children where one may be."""
    children = module._modules
    return bool(children) and (isinstance(module, nn.ModuleList) or any(child._modules for child in children.values() if child is not None))


def _are_layers(modules: list[nn.Module]) -> bool:
    """Whether most of the modules hold tensors of the same names and shapes, and not all of them inside longer lists."""
    layouts = [_layout(module) for module in modules]
    layout, count = Counter(layouts).most_common(1)[0]
    if 2 * count <= len(modules):
        return False
    inner = tuple(f"{block}." for block in _repeated_children(modules[layouts.index(layout)], "")[0])
    return any(not name.startswith(inner) for name, _ in layout)


def _layout(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    """Names and shapes of the parameters below a module."""
    layout: list[tuple[str, torch.Size]] = []
    stack = [("", module)]
    while stack:
        path, current = stack.pop()
        layout += [(path + name, parameter.shape) for name, parameter in current._parameters.items() if parameter is not None]
        stack += [(f"{path}{name}.", child) for name, child in current._modules.items() if child is not None]
    return tuple(layout)


def runs_itself(module: nn.Module) -> bool:
    """Whether the module has a forward; `ModuleList` and `ModuleDict` have none."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def reads_rows_only(module: nn.Module) -> bool:
    """Whether the module is an embedding whose forward reads only the rows that are looked up.

    With `max_norm` the forward rewrites the weight in place, which needs the whole of it; so do sparse gradients, and packed tables that
    do not say of themselves that they look up rows (`looks_up_rows`).
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
        return False
    return module.weight.is_floating_point() or getattr(module, "looks_up_rows", False)


def row_tables(model: nn.Module) -> set[int]:
    """Identities (`id`) of the embedding tables of which a whole forward reads only the rows that are looked up: nothing else uses them."""
    modules = list(distinct_modules(model))
    holders = [module for module in modules if isinstance(module, nn.Embedding) and reads_rows_only(module)]
    tables = {id(parameter) for module in holders for parameter in module._parameters.values()}
    if not tables:
        return tables
    uses = Counter([key for module in modules for parameter in module._parameters.values() if (key := id(parameter)) in tables])
    return {table for table in tables if uses[table] == 1}


def distinct_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, in no particular order: `nn.Module.modules` takes several times as long for many of them."""
    seen = {id(model)}
    stack = [model]
    while stack:
        module = stack.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
