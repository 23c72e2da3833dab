"""Key rules that carry out the hooks of modules: tried on tensors without bytes, which shows what moves, what goes and what is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..protocols import TensorSpec
from .entry import Entry
from .keys import Computed, KeyRules, Renamed, SameNames, Source, Whole
from .load_hooks import FollowedHooks, LoadHooks, carried_out, has_own_code, load_hooks, split, told

__all__ = ["HookedNames", "hooked"]

MOST_NAMES: Final = 20_000
"""Names that may pass through a module's hooks while all the tensors that come from it are computed, each in a pass of its own: an
operation on a tensor without values takes torch up to 0.3 ms."""

_ONE_AT_A_TIME = threading.Lock()
"""Hooks are the user's code: threads that read do not run them together."""


class _Flow(TorchDispatchMode):
    """Notes which entries each tensor is made of, and which ones are written to."""

    def __init__(self, entries: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.made_of = {_memory(tensor): frozenset([name]) for name, tensor in entries.items()}
        """By memory, which views share."""
        self.written: set[str] = set()
        self.together = {name: {name} for name in entries}
        """The entries that meet in an operation, directly or by others."""
        self._alive: list[Any] = []  # so that no memory gets the address of another

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        used: set[str] = set()
        for tensor in _tensors((arguments, keywords)):
            used |= self.origin(tensor)
        result = function(*arguments, **(keywords or {}))
        for tensor in _tensors(result):
            self.made_of[_memory(tensor)] = self.made_of.get(_memory(tensor), frozenset()) | used
            self._alive.append(tensor)
        if function._schema.is_mutable:
            self.written |= used
        met = set().union(*(self.together[name] for name in used))
        self.together.update(dict.fromkeys(met, met))
        return result

    def origin(self, tensor: torch.Tensor) -> frozenset[str]:
        """The entries that a tensor is made of. Raises ValueError for one without values that is made of none."""
        found = self.made_of.get(_memory(tensor))
        if found is None and tensor.is_meta:
            raise ValueError("it uses tensors of the model, which have no values yet")
        return found or frozenset()

    def needed(self, tensor: torch.Tensor) -> list[str]:
        """The entries that have to have values for the tensor to get its own."""
        return sorted(set().union(*(self.together[name] for name in self.origin(tensor))))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@dataclass(slots=True)
class HookedNames:
    """Entries under the names, and with the values, that the modules' hooks give them. A hook that cannot be followed is left out."""

    hooks: LoadHooks
    new_name: Callable[[str], str]
    """What an entry is called when the hooks get to see it."""
    versions: Mapping[str, Mapping[str, Any]]
    """What the checkpoint says of the modules, by their name in it."""
    entry_of: dict[str, str] = field(default_factory=dict)
    """This, and what follows, after `sources`: see `FollowedHooks`."""
    computed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """See `KeyRules.sources`."""
        named: dict[str, str] = {}
        unexpected = []
        for name in sorted(entries, key=lambda entry: self.new_name(entry) == entry):
            if named.setdefault(self.new_name(name), name) != name:
                unexpected.append(name)
        parts = split(named, self.hooks.within.get(None, ()))
        taken = {name for names in parts.values() for name in names}
        found: dict[str, Source] = {name: Whole(entry) for name, entry in named.items() if name not in taken}
        for top, names in parts.items():
            found |= self._below(top, {name: entries[named[name]] for name in names}, named)
        for name, source in list(found.items()):
            if name in targets:
                continue
            del found[name]
            entry = source.name if isinstance(source, Whole) else name
            # Wrappers that hide from the names of a model have hooks that put themselves into them.
            if entry in targets and entry not in found and named.get(entry) == entry:
                found[entry] = source
            else:
                unexpected.append(entry)
        self.entry_of = {name: source.name for name, source in found.items() if isinstance(source, Whole) and source.name != name}
        self.computed = {name for name, source in found.items() if isinstance(source, Computed)}
        return found, unexpected

    def followed(self) -> FollowedHooks:
        """What became of the hooks, after `sources`."""
        return FollowedHooks(self.entry_of, frozenset(self.computed), tuple(self.problems), self.hooks.after)

    def _below(self, top: str, entries: Mapping[str, Entry], named: Mapping[str, str]) -> dict[str, Source]:
        """What stands under which name once the hooks at and below `top` have run."""
        specs = {name: TensorSpec(entry.shape, entry.dtype) for name, entry in entries.items()}
        given = _without_bytes(specs)
        names = {id(tensor): name for name, tensor in given.items()}
        left_out: set[str] = set()
        reasons: list[str] = []
        flow = _Flow(given)

        def attempt(prefix: str, module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            before = dict(state)
            try:
                with torch.no_grad(), flow:
                    state = carried_out(prefix, module, state, self._version(prefix))
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        raise ValueError(f"it puts {type(value).__name__} in the place of {name!r}")
                    flow.origin(value)
            except Exception as error:  # the user's code may raise anything
                left_out.add(prefix)
                reasons.append(f"{told(prefix, module)}: {_does(module)}: {_reason(error)}")
                return before
            return state

        state = self.hooks.walked(top, dict(given), attempt)
        sources: dict[str, Source] = {}
        for name, value in state.items():
            entry = names.get(id(value))
            if entry is not None and entry not in flow.written:
                sources[name] = Whole(named[entry])
                continue
            needed = flow.needed(value)
            function = partial(self._value, top, specs, frozenset(left_out), needed, name)
            sources[name] = Computed(tuple(Whole(named[each]) for each in needed), function, tuple(value.shape), value.dtype)
        passes = sum(isinstance(source, Computed) for source in sources.values())
        if passes * len(specs) > MOST_NAMES:
            module = self.hooks.before[top]
            story = f"it computes {passes} tensors among {len(specs)}, too many to follow"
            self.problems.append(f"{told(top, module)}, with what lies in it: {story}")
            return {name: Whole(named[name]) for name in entries}
        self.problems += reasons
        return sources

    def _value(
        self,
        top: str,
        specs: Mapping[str, TensorSpec],
        left_out: Collection[str],
        needed: list[str],
        target: str,
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """What stands under the name `target` once the hooks have run on the values of the entries `needed`."""

        def step(prefix: str, module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return state if prefix in left_out else carried_out(prefix, module, state, self._version(prefix))

        given = _without_bytes(specs) | dict(zip(needed, values, strict=True))
        with torch.no_grad(), _ONE_AT_A_TIME:
            return self.hooks.walked(top, given, step)[target].cpu()

    def _version(self, prefix: str) -> Mapping[str, Any]:
        return self.versions.get(prefix.removesuffix("."), {})


def hooked(model: nn.Module, rules: KeyRules | None, versions: Mapping[str, Mapping[str, Any]]) -> HookedNames | None:
    """The rules with the hooks of the model's modules; None where it has none, and for rules that do not just rename: they are in charge.

    `versions` is what the checkpoint says of the modules, see `Checkpoint.versions`.
    """
    if not (rules is None or isinstance(rules, SameNames | Renamed)):
        return None
    hooks = load_hooks(model)
    if not hooks.before and not hooks.after:
        return None
    if not isinstance(rules, Renamed):
        return HookedNames(hooks, _same, versions)
    moved = {rules.new_name(f"{name}." if name else "").removesuffix("."): told for name, told in versions.items()}
    return HookedNames(hooks, rules.new_name, moved)


def _same(name: str) -> str:
    return name


def _without_bytes(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}


def _does(module: nn.Module) -> str:
    """What of a module was left out."""
    parts = [f"its {type(module)._load_from_state_dict.__qualname__}"] if has_own_code(module) else []
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    parts += [f"its hook {getattr(hook, '__qualname__', type(hook).__name__)}" for hook in hooks]
    return " and ".join(parts)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
