"""What processes that load together make sure of before they exchange bytes: that all of them have the same model, and read the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from ..errors import MatchError
from .extra_state import extra_state_takers
from .match import Match, model_tensors
from .transfer import Transfer

__all__ = ["Agreement", "agree_with_rank0"]

DIFFERENCES_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Agreement:
    """A process's model, and what fills it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors of the state dict, under all their names; of DTensors the whole ones."""
    ties: Mapping[str, tuple[str, ...]]
    """All names of each of these tensors, sorted."""
    extra_states: frozenset[str]
    """Names of the extra states that modules take."""
    dtypes: Mapping[str, torch.dtype]
    """Of each tensor that is filled, under its first name, in the order of the files. Empty where the process does not read."""


def agree_with_rank0(model: nn.Module, match: Match | None) -> Agreement:
    """What process 0 has, in a call that all processes make. `match` is None where a process does not read.

    Raises `MatchError`, with the same words in all of them, where one has other tensors (names, shapes, ties) or extra states than process
    0, has tensors on meta that nothing fills, or reads others than it or in other dtypes.
    """
    own = _described(model, match)
    told: list[Agreement | None] = [own if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    first = told[0]
    assert first is not None
    stories: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(stories, _story([*_differences(own, first, reads=match is not None), *_unfilled(model, first)]))
    ranks: dict[str, list[str]] = {}
    for rank, story in enumerate(stories):
        if story is not None:
            ranks.setdefault(story, []).append(str(rank))
    if ranks:
        raise MatchError(
            "The processes cannot load together, which takes the same model and checkpoint in all of them; nothing has changed. "
            + " ".join(f"Rank {', '.join(every)}: {story}." for story, every in ranks.items())
        )
    return first


def _described(model: nn.Module, match: Match | None) -> Agreement:
    tensors, names, _ = model_tensors(model)
    ties = {name: tuple(sorted(every)) for every in names.values() for name in every}
    transfers = [] if match is None else sorted(match.transfers.values(), key=_place)
    return Agreement(
        shapes={name: tuple(tensors[name].shape) for name in ties},
        ties=ties,
        extra_states=frozenset(extra_state_takers(model)),
        dtypes={transfer.target: transfer.dtype for transfer in transfers},
    )


def _place(transfer: Transfer) -> tuple[str, int]:
    """Where a transfer begins to read."""
    return next(((str(entry.file), entry.offset) for entry in transfer.entries()), ("", 0))


def _differences(own: Agreement, first: Agreement, *, reads: bool) -> list[str]:
    """In which ways a process is not what process 0 is."""
    found = [f"{name} is not in rank 0's model" for name in own.shapes if name not in first.shapes]
    found += [f"its model lacks {name}" for name in first.shapes if name not in own.shapes]
    both = own.shapes.keys() & first.shapes.keys()
    for name in (name for name in own.shapes if name in both):
        if own.shapes[name] != first.shapes[name]:
            found.append(f"{name} is {list(own.shapes[name])} in its model, {list(first.shapes[name])} in rank 0's")
        elif both.intersection(own.ties[name]) != both.intersection(first.ties[name]):
            found.append(f"{name} is one tensor with {_others(name, own)}, in rank 0's model with {_others(name, first)}")
    found += [f"{name} is in one of its and rank 0's models" for name in sorted(own.extra_states ^ first.extra_states)]
    if reads and not found:
        for name in dict.fromkeys([*own.dtypes, *first.dtypes]):
            if own.dtypes.get(name) != first.dtypes.get(name):
                found.append(f"{name} is {_reading(name, own)} there, {_reading(name, first)} by rank 0")
    return found


def _others(name: str, agreement: Agreement) -> str:
    return ", ".join(other for other in agreement.ties[name] if other != name) or "none other"


def _reading(name: str, agreement: Agreement) -> str:
    return f"read as {agreement.dtypes[name]}" if name in agreement.dtypes else "not read"


def _unfilled(model: nn.Module, first: Agreement) -> list[str]:
    """What would be left without values."""
    tensors, names, empty = model_tensors(model)
    filled = {name for target in first.dtypes for name in first.ties[target]}
    found = [
        f"{name} is on meta, and not in the checkpoint"
        for name in names
        if name in first.ties and name not in filled and tensors[name].is_meta
    ]
    return found + [
        f"{name} is a buffer without values that no checkpoint holds (build the model under init_empty_weights(include_buffers=False))"
        for name in empty
    ]


def _story(differences: Iterable[str]) -> str | None:
    found = list(differences)
    more = [f"and {len(found) - DIFFERENCES_SHOWN} more"] if len(found) > DIFFERENCES_SHOWN else []
    return "; ".join([*found[:DIFFERENCES_SHOWN], *more]) or None
