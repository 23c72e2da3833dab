"""How tensors of a transformers model lie in those of a megatron-core `GPTModel`, there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Rule", "as_it_is", "heads_of", "heads_of_columns", "stacked", "transposed"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of the `GPTModel`, and the tensors of the other model that it is made of."""

    name: str
    """Of the parameter."""
    sources: tuple[str, ...]
    """Names of the other model's tensors."""
    joined: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Makes the whole parameter, `megatron_parts.laid_out`, of the sources."""
    parts: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    """Makes the sources of that."""


def as_it_is(name: str, source: str) -> Rule:
    """The same tensor."""
    return Rule(name, (source,), lambda sources: sources[0], lambda whole: [whole])


def transposed(name: str, source: str) -> Rule:
    """A matrix that is [features in, features out] in the other model."""
    return Rule(name, (source,), lambda sources: sources[0].t(), lambda whole: [whole.t()])


def stacked(name: str, *sources: str) -> Rule:
    """Matrices of one shape that are split each: [matrices, features out, features in]."""
    return Rule(name, sources, lambda each: torch.stack(list(each)), lambda whole: list(whole.unbind()))


def heads_of(name: str, sources: tuple[str, str, str], groups: int, queries: int) -> Rule:
    """Queries, keys and values, which megatron-core keeps by groups: the `queries` heads of a group, then its key, then its value."""

    def parts(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        return _ungrouped(whole, groups, queries)

    return Rule(name, sources, lambda each: _grouped(each, groups), parts)


def heads_of_columns(name: str, source: str, heads: int) -> Rule:
    """One tensor of all queries, then all keys, then all values, along its last dimension."""

    def joined(sources: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = sources[0]
        return _grouped((whole.t() if whole.dim() == 2 else whole).chunk(3), heads)

    def parts(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = torch.cat(list(_ungrouped(whole, heads, 1)))
        return [rows.t() if rows.dim() == 2 else rows]

    return Rule(name, (source,), joined, parts)


def _grouped(each: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    return torch.cat([one.unflatten(0, (groups, -1)) for one in each], dim=1).flatten(0, 1)


def _ungrouped(whole: torch.Tensor, groups: int, queries: int) -> Sequence[torch.Tensor]:
    by_group = whole.unflatten(0, (groups, queries + 2, -1))
    return [part.flatten(0, 2) for part in by_group.split([queries, 1, 1], dim=1)]
