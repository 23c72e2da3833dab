"""Parts of blocks: which weights travel together where the room to pass through does not hold two whole blocks.

Two functions answer everything, for the planner and for the dispatcher alike: `smallest_ring` (how much room do these modules need at
least?) and `parts_for` (what travels together, given that room?).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .modules import READ_THEIR_CHILDREN, runs_itself

__all__ = ["Part", "PassingBytes", "SmallestRing", "parts_for", "smallest_ring"]

PassingBytes = Callable[[str, torch.Tensor], int]
"""Full name and tensor → bytes that it takes of the ring while it passes through, its alignment included; 0 where it does not travel."""

_SMALL_SHARE = 16
"""Modules that take less than this share of a part together (norms, biases) come with the module around them: they run at several points
of its forward, and would travel for each of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that travel together."""

    modules: tuple[str, ...]
    """Full names of the modules whose forward brings it, in the order of the model: any of them, the first that runs."""
    tensors: tuple[str, ...]
    """Full names of its tensors; one that is tied to another part is in both."""
    nbytes: int
    """Room that it takes of the ring."""
    held: bool = False
    """Whether it stays while other parts pass: what a module that is cut holds itself, and its small children."""


@dataclass(frozen=True, slots=True)
class SmallestRing:
    """The least room that some modules can pass through."""

    nbytes: int
    module: str
    """The module that needs most of it: it is not cut any further."""
    module_bytes: int
    """What this module takes alone."""
    held_bytes: int
    """What the modules around it hold themselves, which stays meanwhile."""


@dataclass(slots=True)
class _Node:
    """A module that has a forward, with the tensors that it needs for all of it, and what it calls."""

    name: str
    own: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, identity and bytes of each tensor that it, or a container below it that has no forward, holds itself."""
    children: list[_Node] = field(default_factory=list)
    whole: bool = False
    nbytes: int = 0
    """Everything, each tensor once."""

    def tensors(self) -> Iterator[tuple[str, int, int]]:
        yield from self.own
        for child in self.children:
            yield from child.tensors()


def _distinct_bytes(tensors: Iterable[tuple[str, int, int]]) -> int:
    sizes: dict[int, int] = {}
    for _, key, nbytes in tensors:
        sizes[key] = max(nbytes, sizes.get(key, 0))
    return sum(sizes.values())


def _node(name: str, module: nn.Module, nbytes: PassingBytes, whole: Collection[str], above: Collection[int] = ()) -> _Node:
    """The tree of a module. Tensors that modules `above` hold themselves are there anyway: they take no bytes."""
    node = _Node(name)
    called: list[tuple[str, nn.Module]] = []
    waiting = [(name, module)]
    while waiting:
        path, current = waiting.pop(0)
        for table in (current._parameters, current._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    full = f"{path}.{key}" if path else key
                    node.own.append((full, id(tensor), 0 if id(tensor) in above else nbytes(full, tensor)))
        for key, child in current._modules.items():
            if child is None:
                continue
            child_name = f"{path}.{key}" if path else key
            (called if runs_itself(child) else waiting).append((child_name, child))
    held = {*above, *(key for _, key, _ in node.own)}
    below = [_node(child_name, child, nbytes, whole, held) for child_name, child in called]
    node.children = [child for child in below if next(child.tensors(), None) is not None]
    node.nbytes = _distinct_bytes(node.tensors())
    # A parametrized weight is computed from its children while the module's own forward reads it.
    node.whole = not node.children or name in whole or isinstance(module, READ_THEIR_CHILDREN) or hasattr(module, "parametrizations")
    return node


def _nodes(units: Mapping[str, nn.Module], nbytes: PassingBytes, whole: Collection[str]) -> list[_Node]:
    return [_node(name, module, nbytes, whole) for name, module in units.items()]


def _uncuttable(node: _Node, held_bytes: int) -> Iterator[tuple[int, str, int]]:
    """The smallest parts below a module: the room each needs with what stays around it, its name, and its own bytes."""
    if node.whole:
        yield held_bytes + node.nbytes, node.name, node.nbytes
        return
    held_bytes += _distinct_bytes(node.own)
    for child in node.children:
        yield from _uncuttable(child, held_bytes)


def _largest_two(sizes: Iterable[int]) -> int:
    return sum(sorted(sizes, reverse=True)[:2])


def smallest_ring(
    units: Mapping[str, nn.Module], nbytes: PassingBytes, *, slots: int = 2, whole: Collection[str] = (), held_bytes: int = 0
) -> SmallestRing:
    """The least room (bytes) that the modules `units` (full name → module) can pass through, cut as far as they can be.

    With two `slots` the next part travels while one computes, whichever follow each other; with one they take turns. Modules named in
    `whole` are not cut, nor are leaf modules, `nn.MultiheadAttention` and what else reads its children's weights, and parametrized ones.
    `held_bytes` stay in the ring all the time. A planner does well to give more than this: parts are few, and small modules are not
    brought one by one, if the ring has room for four or more of the largest leaf module.
    """
    nodes = _nodes(units, nbytes, whole)
    found = sorted((each for node in nodes for each in _uncuttable(node, held_bytes)), key=lambda each: -each[0])
    if not found:
        return SmallestRing(held_bytes, "", 0, held_bytes)
    needed_bytes, name, own_bytes = found[0]
    if slots > 1:
        needed_bytes = min(_largest_two(size for size, _, _ in found), _largest_two(held_bytes + node.nbytes for node in nodes))
    return SmallestRing(needed_bytes, name, own_bytes, found[0][0] - own_bytes)


def parts_for(
    units: Mapping[str, nn.Module], nbytes: PassingBytes, ring_bytes: int, *, whole: Collection[str] = (), held_bytes: int = 0
) -> list[Part]:
    """What of the modules `units` (full name → module) travels together through a ring of `ring_bytes`, in the order of the model.

    Each module is one part if any two of them fit. Otherwise modules are cut where their children begin, and neighbours joined again up to
    half of the ring, so that any two parts fit with what stays around them (`Part.held`); where a single module leaves less than half to
    the others, these are cut to what it leaves. With less room than `smallest_ring` says for two slots, some parts take turns with their
    neighbours; less than for one slot is not enough. `whole` and `held_bytes` as there.
    """
    nodes = _nodes(units, nbytes, whole)
    if _largest_two(held_bytes + node.nbytes for node in nodes) <= ring_bytes:
        return [_whole([node]) for node in nodes]
    largest = sorted((size for node in nodes for size, _, _ in _uncuttable(node, held_bytes)), reverse=True)
    limit_bytes = ring_bytes // 2
    if 2 * largest[0] > ring_bytes >= sum(largest[:2]):
        limit_bytes = ring_bytes - largest[0]
    return [part for node in nodes for part in _cut(node, limit_bytes, held_bytes)]


def _whole(nodes: Sequence[_Node]) -> Part:
    tensors = [each for node in nodes for each in node.tensors()]
    return Part(tuple(node.name for node in nodes), tuple(name for name, _, _ in tensors), _distinct_bytes(tensors))


def _cut(node: _Node, limit_bytes: int, held_bytes: int) -> Iterator[Part]:
    """Parts that take at most `limit_bytes` each with what stays around them, where a module allows it."""
    if node.whole or held_bytes + node.nbytes <= limit_bytes:
        yield _whole([node])
        return
    deepest_bytes = max(size for size, _, _ in _uncuttable(node, held_bytes))
    small = _small_children(node, min(limit_bytes - deepest_bytes, (limit_bytes - held_bytes) // _SMALL_SHARE))
    held = [*node.own, *(each for child in small for each in child.tensors())]
    if held:
        yield Part((node.name,), tuple(name for name, _, _ in held), _distinct_bytes(held), held=True)
        held_bytes += _distinct_bytes(held)
    together: list[_Node] = []
    for child in node.children:
        if child in small:
            continue
        is_cut = not child.whole and held_bytes + child.nbytes > limit_bytes
        joined = [each for node in [*together, child] for each in node.tensors()]
        if together and (is_cut or held_bytes + _distinct_bytes(joined) > limit_bytes):
            yield _whole(together)
            together = []
        if is_cut:
            yield from _cut(child, limit_bytes, held_bytes)
        else:
            together.append(child)
    if together:
        yield _whole(together)


def _small_children(node: _Node, room_bytes: int) -> list[_Node]:
    """The smallest children that fit into `room_bytes` together."""
    small: list[_Node] = []
    for child in sorted(node.children, key=lambda each: each.nbytes):
        room_bytes -= child.nbytes
        if room_bytes < 0:
            break
        small.append(child)
    return small
