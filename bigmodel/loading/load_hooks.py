"""What modules do in torch's `load_state_dict`: hooks before it and after it, and code of their own in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

__all__ = [
    "NO_HOOKS",
    "FollowedHooks",
    "IncompatibleKeys",
    "LoadHooks",
    "Step",
    "call_after",
    "carried_out",
    "has_own_code",
    "load_hooks",
    "split",
    "told",
]

logger = logging.getLogger(__name__)

State = dict[str, torch.Tensor]
Step = Callable[[str, nn.Module, State], State]
"""(prefix of a module's names, the module, what it is given) → what it makes of that."""

HARMLESS: Final[frozenset[Callable[..., Any]]] = frozenset(
    cls._load_from_state_dict for cls in (nn.Module, nn.BatchNorm1d, nn.InstanceNorm1d)
)
"""torch's own. Norms fill in or refuse what checkpoints of torch before 0.4.1 lack or have too much, which `match` sees to."""


class IncompatibleKeys(NamedTuple):
    """What hooks after a load are told, under the names that torch gives it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class FollowedHooks:
    """What became of a model's hooks when its tensors were matched."""

    entry_of: Mapping[str, str]
    """Tensors of the model that an entry of another name fills."""
    computed: frozenset[str]
    """Tensors of the model that hooks compute."""
    problems: tuple[str, ...]
    """Modules whose hooks were left out, each with the reason."""
    after: Mapping[str, nn.Module]
    """Modules with hooks that want to be called after the load, by prefix, children first."""


NO_HOOKS: Final = FollowedHooks({}, frozenset(), (), {})
"""Of a model without any, and of one whose key rules take their place."""


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """The modules of a model that do something in `load_state_dict`, by the prefix of their names (`"encoder."`, `""`)."""

    before: Mapping[str, nn.Module]
    """With hooks before, or code of their own; parents first."""
    after: Mapping[str, nn.Module]
    """With hooks after; children first."""
    within: Mapping[str | None, Sequence[str]]
    """Of those `before`: the prefixes directly within another one; under None those that lie in no other."""

    def walked(self, top: str, state: State, step: Step) -> State:
        """What becomes of the names and values below `top`: its own step, then those of the modules within it, on what is left for them."""
        state = step(top, self.before[top], state)
        # As torch has it: names outside of its own are of no use to anybody.
        state = {name: value for name, value in state.items() if name.startswith(top)}
        parts = split(state, self.within.get(top, ()))
        taken = {name for names in parts.values() for name in names}
        result = {name: value for name, value in state.items() if name not in taken}
        for prefix, names in parts.items():
            result |= self.walked(prefix, {name: state[name] for name in names}, step)
        return result


def split(names: Iterable[str], prefixes: Collection[str]) -> dict[str, list[str]]:
    """The names that start with each of the prefixes, none of which starts with another."""
    parts: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    if not parts:
        return parts
    for name in names:
        end = 0
        while name[:end] not in parts:
            end = name.find(".", end) + 1
            if not end:
                break
        else:
            parts[name[:end]].append(name)
    return parts


def load_hooks(model: nn.Module) -> LoadHooks:
    """One look at every module."""
    before: dict[str, nn.Module] = {}
    after: dict[str, nn.Module] = {}
    for prefix, module in _prefixed(model):
        if module._load_state_dict_pre_hooks or has_own_code(module):
            before[prefix] = module
        if module._load_state_dict_post_hooks:
            after[prefix] = module
    within: dict[str | None, list[str]] = {}
    around: list[str] = []
    for prefix in before:
        while around and not prefix.startswith(around[-1]):
            around.pop()
        within.setdefault(around[-1] if around else None, []).append(prefix)
        around.append(prefix)
    return LoadHooks(before, {prefix: after[prefix] for prefix in sorted(after, key=lambda each: -each.count("."))}, within)


def _prefixed(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules with the prefix of their names, parents first; shared ones under each of their names, as in `load_state_dict`."""
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        yield prefix, module
        if module._modules:
            waiting += [(f"{prefix}{name}.", child) for name, child in reversed(module._modules.items()) if child is not None]


def has_own_code(module: nn.Module) -> bool:
    """Whether it loads with code that is not torch's."""
    return type(module)._load_from_state_dict not in HARMLESS or "_load_from_state_dict" in module.__dict__


def carried_out(prefix: str, module: nn.Module, state: State, metadata: Mapping[str, Any]) -> State:
    """What the hooks of one module, and its own code, make of what it is given; the module itself is not filled.

    Raises whatever they raise, and ValueError where they report errors or do what cannot be seen in names and values.
    """
    errors: list[str] = []
    arguments: tuple[Any, ...] = (prefix, dict(metadata), True, [], [], errors)
    if has_own_code(module):
        state = _passed_on(module, state, arguments)
    else:
        for hook in list(module._load_state_dict_pre_hooks.values()):
            hook(state, *arguments)
    if errors:
        raise ValueError("; ".join(errors))
    return state


def _passed_on(module: nn.Module, state: State, arguments: tuple[Any, ...]) -> State:
    """What a module's own `_load_from_state_dict` hands to torch's.

    It runs on a twin that has the module's attributes, but neither tensors nor children, so that nothing is filled.
    """
    if "_load_from_state_dict" in module.__dict__:
        raise ValueError("its _load_from_state_dict belongs to this one object")
    seen: list[State] = []

    def see(given: State, prefix: str, *_: Any) -> None:
        seen.append(dict(given))
        given.pop(f"{prefix}_extra_state", None)  # or the twin would be given it

    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    hooks = {**module._load_state_dict_pre_hooks, -1: see}
    twin.__dict__.update(_parameters={}, _buffers={}, _modules={}, _load_state_dict_pre_hooks=hooks)
    before = dict(twin.__dict__)
    twin._load_from_state_dict(state, *arguments)
    if len(seen) != 1:
        raise ValueError("it does not load by torch's _load_from_state_dict")
    changed = [name for name in before.keys() | twin.__dict__.keys() if before.get(name, seen) is not twin.__dict__.get(name, seen)]
    if changed or twin._parameters or twin._buffers or twin._modules:
        raise ValueError(f"it sets {', '.join(sorted(changed)) or 'tensors or modules'} of the module")
    return seen[0]


def call_after(
    model: nn.Module, after: Mapping[str, nn.Module], missing: Sequence[str], unexpected: Sequence[str], elsewhere: Collection[str] = ()
) -> None:
    """Calls the hooks after the load of those modules that have all their tensors; a warning names the others.

    `elsewhere` names tensors that come into the model later. Raises what the hooks raise.
    """
    left_out = []
    keys = IncompatibleKeys(list(missing), list(unexpected))
    for prefix, module in after.items():
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta for tensor in tensors) or any(name.startswith(prefix) for name in elsewhere):
            left_out.append(told(prefix, module))
            continue
        for hook in list(module._load_state_dict_post_hooks.values()):
            hook(module, keys)
    if left_out:
        logger.warning(
            "The load_state_dict post-hooks of %s were not called, since not all of their weights are in memory. Map these modules to a "
            "device or the CPU where they need them.",
            ", ".join(left_out),
        )


def told(prefix: str, module: nn.Module) -> str:
    """A module in a message."""
    return f"{prefix.removesuffix('.') or 'the model'} ({type(module).__name__})"
