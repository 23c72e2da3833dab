"""Follows the storages that a piece of work allocates and frees, op by op, without looking at their data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["ALLOCATION_UNIT_BYTES", "LiveBytes", "TooManyOperations", "rounded"]

ALLOCATION_UNIT_BYTES = 512
"""Allocators of accelerators hand out multiples of this (torch.cuda's caching allocator: `kMinBlockSize`)."""


class TooManyOperations(Exception):
    """The work was stopped: it takes more operations than it was given."""


def rounded(nbytes: int) -> int:
    """Bytes that an allocator takes for `nbytes`."""
    return -(-nbytes // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES


class LiveBytes(TorchDispatchMode):
    """Within a with block, records every storage that is allocated and when it is freed, and who asked for it.

    `owner()` names whoever runs at the moment. Storages of `known` tensors (weights, inputs) do not count. `answers` are called in place of
    operations that need data, or allocate what cannot be seen. Raises `TooManyOperations` at operation number `limit`.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor],
        owner: Callable[[], str],
        *,
        answers: Mapping[Any, Callable[..., Any]],
        limit: int,
    ) -> None:
        super().__init__()
        self.owner = owner
        self.answers = answers
        self.limit = limit
        self.operations = 0
        self.owners: list[str] = []
        """Of every storage, in the order of their allocation."""
        self.sizes: list[int] = []
        self.events: list[int] = []
        """Numbers of storages: `n` where it is allocated, `~n` where it is freed."""
        self.marks: list[tuple[int, str]] = []
        """Positions in `events`, by name."""
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.operations += 1
        if self.operations == self.limit:
            raise TooManyOperations(f"it takes more than {self.limit:,} operations")
        answer = self.answers.get(func)
        if answer is None:
            result = func(*args, **(kwargs or {}))
        else:
            with self:  # what it allocates on the way counts too
                result = answer(*args, **(kwargs or {}))
        for value in [result] if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        number = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self.owners.append(self.owner())
        self.events.append(number)
        weakref.finalize(storage, self.events.append, ~number).atexit = False

    def mark(self, name: str) -> None:
        """Remembers this moment."""
        self.marks.append((len(self.events), name))

    def alive(self) -> set[int]:
        """Numbers of the storages that are allocated now."""
        return set(range(len(self.sizes))) - {~event for event in self.events if event < 0}

    def timeline(self, without: set[int], known_bytes: int = 0) -> Iterator[tuple[int, int, int | None]]:
        """Position, live bytes (rounded as allocators do, from `known_bytes` on) after it, and the storage allocated there, if one was."""
        live = known_bytes
        for position, event in enumerate(self.events):
            number = event if event >= 0 else ~event
            if number in without:
                continue
            live += rounded(self.sizes[number]) if event >= 0 else -rounded(self.sizes[number])
            yield position, live, event if event >= 0 else None
