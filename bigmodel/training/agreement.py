"""What processes check before a collective: that all of them come to the same one, with tensors that fit each other.

A rank that gathers two numbers while another gathers three makes the library underneath hang, or end the process. So every collective of
this room begins with a frame of fixed size from each rank to all of them: a digest of what the rank is about to do, and, where it fits,
the data itself, which then needs no other trip. Where digests differ, the ranks tell each other in words, and all raise the same error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DistributedOperationException, StructureError
from ..structures import children, keys
from ..text import kind_text
from .state import PartialState

__all__ = ["INLINE_BYTES", "Frames", "Visit", "all_gather", "host_group", "meet"]

DIGEST_BYTES = 16
HEADER_BYTES = DIGEST_BYTES + 8  # and the size of the data, for ranks that do not know it

FRAME_BYTES = 2048
"""On two processes of one host, gloo takes as long for 16 KiB as for 16 bytes; a frame of each of 500 ranks is 1 MiB."""

INLINE_BYTES = FRAME_BYTES - HEADER_BYTES
"""Data of up to so many bytes travels within the frame."""

# Of what many ranks say, a message has so many; and of what one says, so many characters.
MOST_TOLD = 8
WORDS_LENGTH = 200

PACKAGE = str(Path(__file__).parents[1])

# Leaves whose values are compared where every rank must have the same.
_PLAIN = (type(None), bool, int, float, complex, str, bytes)

# Leaves that look like structures and cannot be put together again.
_ONCE = (GeneratorType, map, zip, filter)
_UNORDERED = (Set, ValuesView)

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""`all_gather(output, input)` into one tensor, by the name that this torch has for it."""

_beside: tuple[Any, Any] | None = None


def _dtype_and_shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (str(tensor.dtype), "nested") if tensor.is_nested else (str(tensor.dtype), *tensor.shape)


def _any_tensor(values: Collection[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


@dataclass(slots=True)
class Visit:
    """What a rank brings to a collective.

    `make` is what must be equal in all ranks: the operation, the containers, and of tensors what the operation asks to be equal.
    """

    operation: str
    """As it is called, with the arguments that must be equal: `broadcast(from_process=1)`."""
    make: list[Any] = field(default_factory=list)
    data: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    problem: str | None = None
    """Why this rank cannot take part; the others learn it, rather than wait for it."""
    advice: str = ""
    """What to do where tensors differ."""
    of_tensor: Callable[[torch.Tensor], tuple[Any, ...]] = _dtype_and_shape
    compares_values: bool = False
    """Whether leaves that are no tensors must be equal; else each rank keeps its own."""

    def open(self, data: Any) -> None:
        """Takes in the structure."""
        try:
            self._walk(data)
            self.data = data
        except Exception as error:  # a container's own code may raise anything; the other ranks must not wait for this one
            self.problem = f"the structure cannot be opened: {type(error).__name__}: {error}"

    def _walk(self, data: Any) -> None:
        if isinstance(data, torch.Tensor):
            self.tensors.append(data)
            self.make.append(self.of_tensor(data))
            return
        inside = children(data)
        if inside is None:
            self.make.append(self._leaf(data))
            return
        self.make.append((type(data).__name__, len(inside)))
        if isinstance(data, Mapping):
            self.make.append([key if isinstance(key, (str, int)) else type(key).__name__ for key in data])
        for value in inside:
            self._walk(value)

    def _leaf(self, leaf: Any) -> Any:
        plain = isinstance(leaf, _PLAIN)
        if not plain and (isinstance(leaf, _ONCE) or (isinstance(leaf, _UNORDERED) and _any_tensor(leaf))):
            raise StructureError(f"tensors of {kind_text(leaf)} would be left out: make it a list")
        if not self.compares_values:
            return None
        return leaf if plain else type(leaf).__name__

    def digest(self) -> bytes:
        """Equal where `operation`, `make` and `problem` are."""
        return blake2b(repr((self.operation, self.problem, self.make)).encode(), digest_size=DIGEST_BYTES).digest()

    def lines(self) -> list[tuple[str, str]]:
        """The same in words: where in the structure, and what is there."""
        found: list[tuple[str, str]] = []
        self._tell(self.data, "", found)
        return found

    def _tell(self, data: Any, path: str, found: list[tuple[str, str]]) -> None:
        inside = None if isinstance(data, torch.Tensor) else children(data)
        if isinstance(data, torch.Tensor):
            shown = f"{data.dtype} {list(data.shape)}" if self.of_tensor is _dtype_and_shape and not data.is_nested else None
            found.append((path, shown or " ".join(map(str, self.of_tensor(data)))))
        elif inside is None:
            compared = self.compares_values and isinstance(data, _PLAIN) and data is not None
            found.append((path, repr(data) if compared else type(data).__name__))
        else:
            found.append((path, f"{type(data).__name__} of {len(inside)} ({', '.join(keys(data))})"))
            for key, value in zip(keys(data), inside, strict=True):
                self._tell(value, path + key, found)


@dataclass(frozen=True, slots=True)
class Frames:
    """What the ranks sent with their digests."""

    sizes: list[int]
    """By rank, the bytes of its data."""
    rows: torch.Tensor
    """One row a rank, uint8 of [ranks, INLINE_BYTES]: the data, where it fits."""


def meet(visit: Visit, data: torch.Tensor | None = None) -> Frames:
    """Returns once every rank has come to the same collective.

    Args:
        visit: what this rank is about to do.
        data: uint8 on the CPU; up to `INLINE_BYTES` of it reach every rank, of more only the size does.

    Raises:
        DistributedOperationException: in every rank, where they do not agree or one of them has a problem; in the others, where one has
            ended or did not come in time.
    """
    ranks = dist.get_world_size()
    size = 0 if data is None else data.numel()
    digest = visit.digest()
    frame = bytearray(FRAME_BYTES)
    frame[:HEADER_BYTES] = digest + size.to_bytes(8, "little")
    if data is not None and 0 < size <= INLINE_BYTES:
        frame[HEADER_BYTES : HEADER_BYTES + size] = data.numpy().data
    received = bytearray(ranks * FRAME_BYTES)
    frames = torch.frombuffer(received, dtype=torch.uint8)
    group = host_group()
    try:
        # To each rank the same: gloo sends all of these at once, and what it gathers from rank to rank.
        dist.all_to_all_single(frames, torch.frombuffer(frame * ranks, dtype=torch.uint8), group=group)
    except RuntimeError as error:
        raise DistributedOperationException(
            f"{visit.operation}, called from {_caller()}, did not reach every rank: one of them has ended by its own error (look for "
            f"what it printed) or without calling it, or waits elsewhere. Every rank must call it, the main process not alone. {error}"
        ) from error
    headers = [bytes(received[start : start + HEADER_BYTES]) for start in range(0, len(received), FRAME_BYTES)]
    if visit.problem is not None or any(header[:DIGEST_BYTES] != digest for header in headers):
        _raise(visit, group)
    return Frames([int.from_bytes(header[DIGEST_BYTES:], "little") for header in headers], frames.view(ranks, -1)[:, HEADER_BYTES:])


def host_group() -> Any:
    """The group that frames travel in: the default one where it takes tensors of the CPU, else one of gloo beside it.

    Frames are read on the host; on the device, reading them would wait for everything that was queued before.
    """
    global _beside
    if PartialState().backend == "gloo":
        return None
    if _beside is None or _beside[0] is not dist.group.WORLD:
        _beside = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _beside[1]


def _raise(visit: Visit, group: Any) -> None:
    stories: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stories, (visit.operation, visit.problem, visit.lines(), _caller()), group=group)
    operations, problems, lines, callers = zip(*stories, strict=True)
    broken = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    if broken:
        first = next(operation for operation, problem in zip(operations, problems, strict=True) if problem is not None)
        message = f"{first} cannot be done. {_some(broken)}."
    elif len(set(operations)) > 1:
        message = f"The ranks call different operations: {_by_rank(operations)}. Every rank must call the same one, in the same order."
    else:
        message = f"The ranks do not agree in {visit.operation}: {_difference(lines)} {visit.advice}".rstrip()
    raise DistributedOperationException(f"{message}\nCalled from: {_by_rank(callers)}.")


def _difference(lines: Sequence[list[tuple[str, str]]]) -> str:
    for row in range(max(map(len, lines))):
        here = [_place(*found[row]) if row < len(found) else "nothing more" for found in lines]
        if len(set(here)) > 1:
            return f"{_by_rank(here)}."
    return "keys of a mapping differ that are neither strings nor numbers."


def _place(path: str, what: str) -> str:
    shown = what if len(what) <= WORDS_LENGTH else f"{what[:WORDS_LENGTH]}…"
    return f"{shown} at {path}" if path else shown


def _by_rank(values: Sequence[str]) -> str:
    """`ranks 0, 2: this; rank 1: that`: each value once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    told = []
    for value, having in ranks.items():
        shown = ", ".join(map(str, having[:MOST_TOLD])) + (", …" if len(having) > MOST_TOLD else "")
        told.append(f"rank{'s' if len(having) > 1 else ''} {shown}: {value}")
    return _some(told)


def _some(told: Sequence[str]) -> str:
    more = len(told) - MOST_TOLD
    return "; ".join(told[:MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _caller() -> str:
    """Where the collective was called: the innermost line that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
