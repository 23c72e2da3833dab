"""What fills a tensor of the model: entries, and views of entries put together. Declared, so that bytes can be read straight into place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..errors import PlanError
from ..protocols import TensorSpec
from .entry import Entry

__all__ = [
    "Computed",
    "Concatenate",
    "KeepsScales",
    "KeyRules",
    "Renamed",
    "SameNames",
    "Slice",
    "Source",
    "Stack",
    "Transpose",
    "Unmade",
    "Whole",
]


@dataclass(frozen=True, slots=True)
class Source:
    """Something that gives one tensor, made from entries of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Whole(Source):
    """An entry as it is."""

    name: str


@dataclass(frozen=True, slots=True)
class Stack(Source):
    """Sources of one shape, side by side along a new dimension (`torch.stack`)."""

    sources: tuple[Source, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Concatenate(Source):
    """Sources, one after the other along a dimension (`torch.cat`)."""

    sources: tuple[Source, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Slice(Source):
    """A part of a source along one dimension (`torch.narrow`)."""

    source: Source
    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Transpose(Source):
    """A source with two dimensions swapped (`torch.transpose`)."""

    source: Source
    dim0: int
    dim1: int


@dataclass(frozen=True, slots=True)
class Computed(Source):
    """Whatever a function makes of whole tensors. The fallback: its inputs are held in memory while it runs."""

    sources: tuple[Source, ...]
    function: Callable[[list[torch.Tensor]], torch.Tensor]
    """Gets the sources' tensors (contiguous, on CPU, in the checkpoint's dtype)."""
    shape: tuple[int, ...]
    """Of the function's result."""
    dtype: torch.dtype | None = None
    """Of the function's result; None where it is the tensor's own dtype in the model, so that nothing is cast after it."""


@dataclass(frozen=True, slots=True)
class Unmade(Source):
    """A tensor that the rules know, but cannot make of what the checkpoint holds."""

    reason: str
    """Why, without a full stop."""


class KeyRules(Protocol):
    """How the names of a checkpoint become the names of a model."""

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """What fills each target (those that nothing fills are left out), and the names of entries that fill nothing."""
        ...


@runtime_checkable
class KeepsScales(Protocol):
    """Key rules for a model that takes some weights in 8 bits as they are."""

    @property
    def kept_scales(self) -> Collection[str]:
        """Entries that are scales of such weights: these are not multiplied with them."""
        ...


class SameNames:
    """Every entry fills the tensor of its own name."""

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """See `KeyRules.sources`."""
        return {name: Whole(name) for name in entries if name in targets}, [name for name in entries if name not in targets]


@dataclass(frozen=True, slots=True)
class Renamed:
    """Entries under other names: `strip_prefix` goes, the regular expressions are replaced in order (`re.sub`), `add_prefix` comes."""

    rules: Sequence[tuple[str, str]] = ()
    strip_prefix: str = ""
    add_prefix: str = ""

    def new_name(self, name: str) -> str:
        """The name in the model of the entry `name`."""
        name = name.removeprefix(self.strip_prefix)
        for pattern, replacement in self.rules:
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise PlanError(f"The rule {pattern!r} → {replacement!r} is none that re.sub takes ({error}).") from error
        return self.add_prefix + name

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """See `KeyRules.sources`. An entry that already has a target's name yields to one that is renamed to it."""
        found: dict[str, Source] = {}
        taken: dict[str, str] = {}
        unexpected = []
        for name in sorted(entries, key=lambda entry: self.new_name(entry) == entry):
            target = self.new_name(name)
            if target in targets and target not in found:
                found[target] = Whole(name)
                taken[target] = name
            else:
                unexpected.append(name)
        return found, unexpected
