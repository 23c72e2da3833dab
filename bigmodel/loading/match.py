"""Which bytes of a checkpoint fill which tensor of a model, checked both ways before a byte is read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import MatchError, PlanError
from ..modules import get_non_persistent_buffers, tensor_aliases
from ..protocols import Offloaded, TensorSpec
from ..text import kind_text, listed
from .checkpoint import Checkpoint
from .checksum import checksums_in
from .entry import Entry, FileIdentity
from .extra_state import JSON_TEXT, ExtraState, extra_state_takers
from .hooked import hooked
from .keys import KeepsScales, KeyRules, SameNames, Source, Whole
from .load_hooks import NO_HOOKS, FollowedHooks
from .location import CheckpointFile
from .scales import ScaledEntries, packed_form, scaled_entries
from .transfer import Computation, Transfer, lower

__all__ = ["DtypeOf", "Match", "match", "model_tensors", "some"]

DtypeOf = Callable[[str, TensorSpec, torch.dtype], torch.dtype]
"""(name in the model, its shape and dtype there, dtype in the file) → the dtype that it shall have."""

SCALE_ENDINGS: Final = ("_scale", "_scale_inv", ".scale", ".scales", ".absmax")
"""How the companions of packed weights are named, beside the weight: `weight_scale` (compressed-tensors, fbgemm), `weight_scale_inv`
(DeepSeek), `absmax` (bitsandbytes 4-bit; its 8-bit `SCB` stands beside the weight). Only to be named in a message."""
NAMES_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Match:
    """The transfers that fill a model, and everything that does not fit."""

    transfers: Mapping[str, Transfer]
    """By the first name of each tensor of the model."""
    missing: tuple[str, ...]
    """Tensors of the model that nothing fills: parameters, and buffers without values (on meta)."""
    ignored: tuple[str, ...]
    """Tensors that nothing fills, which the caller allowed by `ignore_missing`."""
    kept: tuple[str, ...]
    """Persistent buffers and extra states that the file lacks and that keep the values they have."""
    unexpected: tuple[str, ...]
    """Entries that fill nothing."""
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Name, shape in the model, shape in the checkpoint."""
    unmade: tuple[tuple[str, str], ...]
    """Name, and why its key rule cannot be carried out."""
    refused: tuple[tuple[str, str], ...]
    """Name, and why its entry must not be cast to the model's dtype."""
    empty_buffers: tuple[str, ...]
    """Buffers on meta that no checkpoint holds (non-persistent): they must be computed."""
    aliases: Mapping[str, str]
    """Other names of the same tensors (ties) → the name under which the transfer stands."""
    location: str
    available: Mapping[str, Entry]
    """All entries, for suggestions."""
    identities: Mapping[CheckpointFile, FileIdentity]
    """The checkpoint's files as they were when it was opened."""
    extra_states: Mapping[str, ExtraState]
    """What fills the extra states of modules, by name in the state dict."""
    checksums: Mapping[str, str]
    """Of entries, by name, where the checkpoint has them."""
    hooks: FollowedHooks = NO_HOOKS
    """What became of what the modules do in `load_state_dict`."""

    @property
    def without_entry(self) -> tuple[str, ...]:
        """Tensors of the model and extra states that the checkpoint does not fill."""
        return self.missing + self.ignored + self.kept

    def check(self, *, strict: bool = False, allow_empty_buffers: bool = False) -> None:
        """Raises `MatchError` with everything that would leave the model wrong; `strict` refuses unexpected and kept names too."""
        problems = []
        if self.missing:
            problems.append(self._missing_story())
        if self.misshapen:
            lines = [
                f"{name}: {list(expected)} in the model, {list(found)} in the checkpoint{self._packed_story(name)}"
                for name, expected, found in self.misshapen
            ]
            problems.append(f"shapes differ: {some(lines, '; ')}")
        if self.unmade:
            problems.append(f"cannot be made: {some([why for _, why in self.unmade], '; ')}")
        if self.refused:
            problems.append(f"values would be lost: {some([f'{name} ({why})' for name, why in self.refused], '; ')}")
        if self.empty_buffers and not allow_empty_buffers:
            problems.append(
                f"buffers without values that no checkpoint holds: {some(self.empty_buffers)}; build the model under "
                "init_empty_weights(include_buffers=False), or compute them before loading"
            )
        if strict and self.unexpected:
            problems.append(f"unexpected in the checkpoint: {some(self.unexpected)}")
        if strict and self.kept:
            problems.append(f"buffers or extra states missing in the checkpoint: {some(self.kept)}")
        if problems:
            raise MatchError(
                f"{self.location} does not fit the model. " + ". ".join(problem[0].upper() + problem[1:] for problem in problems) + "."
            )

    def _missing_story(self) -> str:
        free = self.unexpected or tuple(self.available)
        lines = []
        for name in self.missing[:NAMES_SHOWN]:
            story = self._packed_story(name)
            nearest = [] if story else difflib.get_close_matches(name, free, n=1)
            lines.append(f"{name}{story}" + (f" (nearest in the checkpoint: {nearest[0]})" if nearest else ""))
        if len(self.missing) > NAMES_SHOWN:
            lines.append(f"and {len(self.missing) - NAMES_SHOWN} more")
        return f"nothing fills {len(self.missing)} tensors of the model: {', '.join(lines)}{_prefix_hint(self.missing, self.available)}"

    def _packed_story(self, name: str) -> str:
        packed = packed_form(name, self.available)
        return "" if packed is None else f" ({packed})"


def some(items: Sequence[str], separator: str = ", ") -> str:
    """The first of them, and how many more there are."""
    shown = separator.join(items[:NAMES_SHOWN])
    return shown if len(items) <= NAMES_SHOWN else f"{shown}{separator}and {len(items) - NAMES_SHOWN} more"


def _prefix_hint(missing: Sequence[str], available: Iterable[str]) -> str:
    """What a constant prefix more or less on the names of the checkpoint would explain."""
    names = set(available)
    for name in missing[:1]:
        for other in sorted(names):
            if other.endswith("." + name):
                prefix = other[: -len(name)]
                if all(prefix + each in names for each in missing):
                    return f'. The checkpoint\'s names start with {prefix!r}: load with Renamed(strip_prefix="{prefix}")'
            if name.endswith("." + other):
                prefix = name[: -len(other)]
                if all(each.startswith(prefix) and each[len(prefix) :] in names for each in missing):
                    return f'. The checkpoint\'s names lack {prefix!r}: load with Renamed(add_prefix="{prefix}")'
    return ""


def model_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[str]], list[str]]:
    """Tensors of the state dict by first name, all their names, and the non-persistent buffers on meta."""
    transient = get_non_persistent_buffers(model, recurse=True, fqns=True)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors |= {name: buffer for name, buffer in buffers.items() if name not in transient}
    names: dict[str, list[str]] = {}
    for every in tensor_aliases(model, include_buffers=True).values():
        persistent = [name for name in every if name in tensors]
        if persistent:
            names[persistent[0]] = persistent
    empty = [name for name, buffer in buffers.items() if name in transient and buffer.device.type == "meta"]
    return tensors, names, empty


def match(
    model: nn.Module,
    checkpoint: Checkpoint,
    rules: KeyRules | None = None,
    *,
    dtype_of: DtypeOf | None = None,
    ignore_missing: str | Collection[str] = (),
    ignore_unexpected: str | Collection[str] = (),
) -> Match:
    """Pairs the tensors of `model` with the entries that fill them.

    Tied tensors (one object under several names) are filled once, by whichever of their names the checkpoint has. `dtype_of` decides each
    tensor's dtype (default: the model's own). Names that one of the regular expressions `ignore_missing` or `ignore_unexpected` finds are
    not reported. Without rules, or with `Renamed`, what modules do in `load_state_dict` takes part (see `HookedNames`). What does not fit
    is in the result, see `Match.check`. Raises `PlanError` for one that is no regular expression.
    """
    may_miss = _patterns(ignore_missing, "ignore_missing")
    may_be_left = _patterns(ignore_unexpected, "ignore_unexpected")
    tensors, names, empty = model_tensors(model)
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise MatchError(
            f"{some(lazy)} of the model have no shape yet: they belong to lazy modules. Run a forward first, which gives them one."
        )
    hooks = hooked(model, rules, checkpoint.versions)
    rules = hooks or rules
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    scaled = scaled_entries(checkpoint.entries, specs, rules.kept_scales if isinstance(rules, KeepsScales) else ())
    entries = scaled.entries
    takers = extra_state_takers(model)
    sources, unexpected = (rules or SameNames()).sources(entries, specs | {name: _extra_spec(name, entries) for name in takers})
    transfers: dict[str, Transfer] = {}
    missing: list[str] = []
    ignored: list[str] = []
    kept: list[str] = []
    aliases: dict[str, str] = {}
    misshapen: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    unmade: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    for first, every in names.items():
        aliases.update(dict.fromkeys(every[1:], first))
        source = next((sources[name] for name in every if name in sources), None) or _aliased(every, sources, checkpoint)
        if source is None:
            if any(pattern.search(name) for pattern in may_miss for name in every):
                ignored.append(first)
                continue
            has_values = tensors[first].device.type != "meta" or isinstance(tensors[first], Offloaded)
            is_value = not isinstance(tensors[first], nn.Parameter) and has_values
            (kept if is_value else missing).append(first)
            continue
        try:
            transfer = lower(source, entries, first, specs[first].dtype)
        except MatchError as error:
            unmade.append((first, str(error).rstrip(".")))
            continue
        if transfer.shape != specs[first].shape:
            misshapen.append((first, specs[first].shape, transfer.shape))
            continue
        transfer, objection = _with_dtype(transfer, specs[first], dtype_of, scaled)
        if objection is not None:
            refused.append((first, objection))
            continue
        transfers[first] = transfer
    extra_states: dict[str, ExtraState] = {}
    for name in takers:
        source = sources.get(name) or _aliased([name], sources, checkpoint)
        if source is not None:
            extra_states[name] = _extra_state(name, source, checkpoint, entries)
        else:
            (ignored if any(pattern.search(name) for pattern in may_miss) else kept).append(name)
    return Match(
        transfers=transfers,
        missing=tuple(missing),
        ignored=tuple(ignored),
        kept=tuple(kept),
        unexpected=tuple(name for name in unexpected if not any(pattern.search(name) for pattern in may_be_left)),
        misshapen=tuple(misshapen),
        unmade=tuple(unmade),
        refused=tuple(refused),
        empty_buffers=tuple(empty),
        aliases=aliases,
        location=str(checkpoint.location),
        available=entries,
        identities=checkpoint.identities,
        extra_states=extra_states,
        checksums=checksums_in(checkpoint.metadata),
        hooks=NO_HOOKS if hooks is None else hooks.followed(),
    )


def _patterns(given: str | Collection[str], argument: str) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in listed(given):
        try:
            compiled.append(re.compile(pattern))
        except (re.error, TypeError) as error:
            raise PlanError(f"{argument}: {pattern!r} is no regular expression ({error}). A name as it is: re.escape(name).") from error
    return compiled


def _extra_spec(name: str, entries: Mapping[str, Entry]) -> TensorSpec:
    """For key rules: an extra state is what the checkpoint has; the model alone does not say."""
    entry = entries.get(name)
    return TensorSpec((0,), torch.uint8) if entry is None else TensorSpec(entry.shape, entry.dtype)


def _extra_state(name: str, source: Source, checkpoint: Checkpoint, entries: Mapping[str, Entry]) -> ExtraState:
    transfer = lower(source, entries, name, torch.uint8)
    dtype = next((piece.origin.dtype for piece in transfer.pieces if piece.origin.dtype is not None), torch.uint8)
    transfer = Transfer(name, transfer.shape, dtype, transfer.pieces)
    if isinstance(source, Whole) and source.name in checkpoint.values:
        value = checkpoint.values[source.name]
        if _holds_tensors(value):
            raise MatchError(
                f"{checkpoint.location}: {source.name!r} is {kind_text(value)} with tensors in it, which is not read. "
                "Fill the model by torch (load_state_dict(torch.load(...))), or let get_extra_state give a tensor or values without any."
            )
        return ExtraState(transfer, False, (value,))
    is_text = isinstance(source, Whole) and checkpoint.metadata.get(source.name) == JSON_TEXT and dtype == torch.uint8
    return ExtraState(transfer, is_text)


def _holds_tensors(value: object) -> bool:
    """Whether there are tensors in containers (which an archive of torch may nest deeply, but not endlessly)."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            return True
        if id(each) not in seen and isinstance(each, (list, tuple, set, frozenset, Mapping)):
            seen.add(id(each))
            waiting += [*each.keys(), *each.values()] if isinstance(each, Mapping) else each
    return False


def _aliased(names: Sequence[str], sources: Mapping[str, Source], checkpoint: Checkpoint) -> Source | None:
    """What fills a tensor that was saved under another name: `safetensors.torch.save_model` and `save_model` note it in the metadata."""
    saved = [checkpoint.metadata[name] for name in names if name in checkpoint.metadata]
    return next((sources[name] for name in saved if name in sources), None) or next(
        (Whole(name) for name in saved if name in checkpoint.entries), None
    )


def _with_dtype(transfer: Transfer, spec: TensorSpec, dtype_of: DtypeOf | None, scaled: ScaledEntries) -> tuple[Transfer, str | None]:
    """The transfer with the dtype that the tensor shall have, and why it must not get it (None when it may)."""
    found = [piece.origin.dtype for piece in transfer.pieces if piece.origin.dtype is not None]
    in_file = found[0] if found else spec.dtype
    dtype = spec.dtype if dtype_of is None else dtype_of(transfer.target, spec, in_file)
    transfer = Transfer(transfer.target, transfer.shape, dtype, transfer.pieces)
    for piece in transfer.pieces:
        if isinstance(piece.origin, Computation):
            # Its function has done what had to be done with scales; what it gives is cast like anything else.
            why = None if piece.origin.dtype is None else _lossy(piece.origin.dtype, dtype)
            if why is not None:
                return transfer, why
            continue
        why = _lossy(piece.origin.dtype, dtype)
        if why is not None:
            name = piece.origin.name
            companions = [name + ending for ending in SCALE_ENDINGS] + [f"{name.rpartition('.')[0]}.SCB"]
            scale = next((companion for companion in companions if companion in scaled.entries), None)
            reason = scaled.refused.get(name) or (f"its scale {scale} would be ignored" if scale else None)
            return transfer, why if reason is None else f"{why}; {reason}"
    return transfer, None


def _lossy(found: torch.dtype, wanted: torch.dtype) -> str | None:
    """Why a plain cast from `found` to `wanted` would give other numbers than the checkpoint means; None when it would not."""
    if found == wanted or found == torch.bool:
        return None
    told = f"{found} in the checkpoint, {wanted} in the model"
    if found.is_floating_point and wanted.is_floating_point:
        if found.itemsize > 1 and wanted.itemsize > 1:
            return None
        bits = 4 if "float4" in f"{found} {wanted}" else 8
        return f"{told}: {bits}-bit floats need their scale, a plain cast loses it"
    if found.is_complex and wanted.is_complex:
        return None
    if found.is_floating_point or found.is_complex or wanted.is_complex:
        return f"{told}: a cast would destroy the values"
    if wanted.is_floating_point:
        return f"{told}: packed or quantized values need their scale, a plain cast loses it"
    if wanted == torch.bool:
        return None
    has, takes = torch.iinfo(found), torch.iinfo(wanted)
    return None if takes.min <= has.min and has.max <= takes.max else f"{told}: not all values fit"
