"""Dispatch: applies a device map to a model, and takes it off again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..device_map import normalized
from ..devices import DeviceKey, unallocated_bytes
from ..modules import reads_rows_only, runs_itself
from ..protocols import Store
from .bringing import Bringing, Brought, modules_of, name_of
from .cut import Cut, Registered, ancestors, cut, distinct_owners, registered_tensors
from .decision import Decision, decide
from .dispatch_hook import DispatchHook
from .facade import put_on_facade, take_off_facade
from .group import Group
from .hooks import (
    DISPATCHED,
    ModelHook,
    ModuleReference,
    SequentialHook,
    add_hook_to_module,
    drop_shown_hooks,
    hooks_of,
    remove_hook_from_module,
)
from .layout import Owner
from .lazy import LazyTensor
from .offload import Resting, make_group, restore, set_tensor
from .origin import Tally
from .placeholder import Placeholder
from .schedule import Schedule
from .stores import MemoryStore

__all__ = ["Dispatched", "dispatch", "dispatched", "undispatch"]


@dataclass
class Dispatched:
    """What a dispatched model carries with it."""

    device_map: dict[str, DeviceKey]
    main_device: torch.device
    schedule: Schedule
    _hooked: list[ModuleReference] = field(default_factory=list, init=False)

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules that have hooks of it."""
        return [module for reference in self._hooked if (module := reference()) is not None]

    def hooks(self, module: nn.Module) -> None:
        """Remembers a module that got one."""
        self._hooked.append(ModuleReference(module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatched:
        made = Dispatched(dict(self.device_map), self.main_device, deepcopy(self.schedule, memo))
        memo[id(self)] = made
        made._hooked = [ModuleReference(deepcopy(module, memo)) for module in self.hooked]
        return made

    def end(self, model: nn.Module) -> None:
        """Frees the buffers, and takes off the model what `dispatch` left on it beside the hooks."""
        self.schedule.close()
        take_off_facade(model)
        drop_shown_hooks(model)
        model.__dict__.pop(DISPATCHED, None)


def dispatched(model: nn.Module) -> Dispatched | None:
    """What `dispatch` left on the model; None if it is not dispatched."""
    state = model.__dict__.get(DISPATCHED)
    return state if isinstance(state, Dispatched) else None


def dispatch(
    model: nn.Module,
    device_map: Mapping[str, Any],
    *,
    main_device: torch.device,
    store: Store | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    force_hooks: bool = False,
    prefetch: bool = True,
    ring_bytes: int | None = None,
) -> nn.Module:
    """Places the model's tensors as the map says, and hooks the modules that need it. Returns the model.

    Args:
        device_map: module (or tensor) names → an accelerator's index (resident there), `"cpu"` (with an accelerator as the main device:
            rests in RAM, runs on the main device; otherwise stays), `"cpu:resident"` (rests in RAM and runs there), `"disk"` (rests in
            `store`, runs on the main device).
        main_device: where offloaded modules run, where inputs go, and where outputs come from.
        store: where tensors that are on meta, or mapped to disk, rest, under their full names (any of a tied tensor's names).
        offload_buffers: whether persistent buffers of offloaded modules are offloaded too.
        skip_keys: names of arguments, and keys of nested dicts, that are never moved.
        preload_module_classes: class names of modules whose weights all come with their own forward.
        no_split_module_classes: class names of blocks; found if not given.
        force_hooks: adds hooks even if nothing has to move.
        prefetch: whether the next group is fetched while one computes.
        ring_bytes: upper bound of the memory on an execution device that groups pass through; by default two of the largest, or less where
            less is free beside the resident weights. Where it does not hold two blocks, these travel in parts (`parts.parts_for`).

    A model that is dispatched already is dispatched anew. Raises `DispatchError`, with nothing changed, for a parameter that no entry
    covers, a tensor on meta that rests nowhere, one whose shape differs from what rests in the store, or a ring that the largest leaf
    module does not fit into.
    """
    plan = cut(
        model,
        normalized(device_map),
        main_device,
        no_split_module_classes=no_split_module_classes,
        preload_module_classes=preload_module_classes,
    )
    tensors = registered_tensors(model)
    # Ties are brought once whatever it says; libraries look for the addresses of tied weights in it.
    tied = [each.tensor for each in tensors if len(each.places) > 1 and type(each.tensor) is nn.Parameter]
    tied_params_map: dict[int, Any] = {tensor.data_ptr(): {} for tensor in tied if tensor.device.type != "meta"}
    known = frozenset(store.names()) if store is not None else frozenset()
    decisions = [decide(plan, tensor, store, known, offload_buffers) for tensor in tensors]
    bringing = Bringing(plan, ring_bytes)
    for decision in decisions:
        for device, places in decision.away.items():
            bringing.add(device, (name for name, _ in places), decision.passing_bytes(device))
    rings = bringing.cut(lambda device: _free_bytes(device, decisions, dispatched(model)))
    earlier_hooks = _strip(model)
    schedule = Schedule(prefetch=prefetch, rings=rings)
    groups = _offload(bringing, decisions, schedule)
    _lend_first_layers(model, groups)
    state = Dispatched(dict(plan.device_map), main_device, schedule)
    _hook(plan, groups, state, skip_keys=skip_keys, force=force_hooks, tied_params_map=tied_params_map)
    if state.hooked:
        model.__dict__[DISPATCHED] = state
        put_on_facade(model, main_device)
    _release(earlier_hooks)  # at the end: who takes back what was done until an error finds them as they were
    return model


def _free_bytes(device: torch.device, decisions: Iterable[Decision], earlier: Dispatched | None) -> int:
    """What is free on `device` once every resident weight is there, and every other one and the ring of an `earlier` dispatch are gone."""
    free = unallocated_bytes(device)
    for decision in decisions:
        tensor = decision.tensor.tensor
        free += tensor.nbytes * ((tensor.device == device) - (decision.home == device))
    pool = None if earlier is None else earlier.schedule.pools.get(device)
    return free if pool is None else free + pool.nbytes


def _offload(bringing: Bringing, decisions: list[Decision], schedule: Schedule) -> dict[str, list[Group]]:
    """Moves what is resident, takes out what is offloaded, and returns the groups that each module's forward brings."""
    memory = MemoryStore()
    members: dict[Brought, list[Resting]] = {}
    for decision in decisions:
        tensor = decision.tensor
        value = tensor.tensor
        source, key = decision.store, decision.key
        modified = isinstance(value, LazyTensor) and _rewritten(value)
        if decision.home is not None:
            value = _settle(tensor, decision.home, source, key)
            source = None
        elif decision.kind == "cpu" and not _in_ram(value):
            source, key = memory, tensor.name
            memory.put(key, _value(tensor.tensor, decision.store, decision.key))
            if isinstance(value, LazyTensor):
                value = _as_meta(value)
        elif isinstance(value, LazyTensor) and source is not None and not modified:
            value = _as_meta(value)
        elif isinstance(value, LazyTensor):
            source = None
        for device, places in decision.away.items():
            by = frozenset(bringing.bringers(device, name) for name, _ in places)
            members.setdefault((by, device), []).append(Resting(tensor.name, distinct_owners(places), value, source, key, modified))
            # All further groups of the same tensor share the placeholder that the first one makes.
    beside = bringing.beside(members)
    groups: dict[str, list[Group]] = {}
    made: dict[int, torch.Tensor] = {}
    for (by, device), tensors in members.items():
        shared = [
            Resting(entry.name, entry.owners, made[id(entry.tensor)], None) if id(entry.tensor) in made else entry for entry in tensors
        ]
        group = make_group(name_of(by), shared, schedule.pool(device), schedule.tally, beside=(by, device) in beside)
        for entry, slot in zip(tensors, group.slots, strict=True):
            made[id(entry.tensor)] = slot.resting
        schedule.add(group)
        for module in modules_of(by):
            groups.setdefault(module, []).append(group)
    return groups


def _in_ram(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, LazyTensor) and tensor.origin.store.kind == "cpu"


def _rewritten(lazy: LazyTensor) -> bool:
    """Whether its values are no longer those of the tensor of the same name in a checkpoint."""
    return lazy.origin.modified or len(lazy.origin.source[1]) > 1


def _as_meta(lazy: LazyTensor) -> torch.Tensor:
    stand_in = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
    if not isinstance(lazy, Placeholder):
        return stand_in
    made = nn.Parameter(stand_in, lazy.requires_grad)
    made.__dict__.update({key: value for key, value in lazy.__dict__.items() if key not in ("origin", "parameter_class")})
    return made


def _value(tensor: torch.Tensor, store: Store | None, key: str) -> torch.Tensor:
    """The tensor's values, on CPU if they have to be fetched."""
    if isinstance(tensor, LazyTensor):
        return tensor.origin.fetch(torch.device("cpu"))
    if tensor.device.type == "meta":
        assert store is not None
        resting = Resting(key, [Owner(nn.Module(), key, True)], tensor, store, key)
        lazy = make_group("", [resting], Schedule().pool(torch.device("cpu")), Tally()).slots[0].resting
        assert isinstance(lazy, LazyTensor)
        return lazy.origin.fetch(torch.device("cpu"))
    return tensor.detach()


def _settle(tensor: Registered, device: torch.device, store: Store | None, key: str) -> torch.Tensor:
    """Makes a tensor resident on `device`, as the same object where torch allows it."""
    value = tensor.tensor
    if not isinstance(value, LazyTensor) and value.device == device:
        return value
    if type(value) is nn.Parameter and value.device.type != "meta":
        value.data = value.data.to(device)
        return value
    if isinstance(value, LazyTensor) or value.device.type == "meta":
        real = _value(value, store, key).to(device)
        if not tensor.is_buffer:
            attributes = {name: item for name, item in value.__dict__.items() if name not in ("origin", "parameter_class")}
            real = nn.Parameter(real, value.requires_grad)
            real.__dict__.update(attributes)
    else:
        real = value.to(device)  # a subclass with state of its own (packed weights) knows how to move it
    set_tensor(tensor.owners, real)
    return real


def _lend_first_layers(model: nn.Module, groups: dict[str, list[Group]]) -> None:
    """Brings the first layer of an `nn.TransformerEncoder` for its whole forward: its weights decide how padding is skipped."""
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):
            first = groups.get(f"{name}.layers.0" if name else "layers.0", [])
            if first:
                groups.setdefault(name, []).extend(first)


def _hook(
    plan: Cut, groups: dict[str, list[Group]], state: Dispatched, *, skip_keys: Any, force: bool, tied_params_map: dict[int, Any]
) -> None:
    """Adds the hooks: at the units that bring groups, and wherever arguments may have to change devices."""
    devices = {plan.tensor_runs(name) for name, _ in plan.model.named_parameters(remove_duplicate=False)}
    moves = len(devices | {state.main_device}) > 1 or (len(set(plan.device_map.values())) > 1 and state.main_device.type != "cpu")
    if not groups and not moves and not force:
        return
    devices_at = {unit: plan.runs(unit) for unit in groups}
    devices_at[""] = state.main_device
    if moves or force or state.main_device.type != "cpu":
        for path in plan.boundaries():
            name = plan.first_names[id(plan.model.get_submodule(path))]
            devices_at.setdefault(name, plan.runs(name))
        for path, name, device in plan.holders():
            # Outside the blocks anything may be given what a block on another device has put out.
            if devices_at[_hooked_above(path, devices_at)] != device or (moves and not plan.within_unit(path)):
                devices_at.setdefault(name, device)
    # Libraries look for hooks on the modules around the blocks too (the encoder of an encoder-decoder), and call these by themselves.
    for above in [above for name in devices_at for above in ancestors(name)]:
        if above not in devices_at and runs_itself(plan.model.get_submodule(above)):
            devices_at[above] = plan.runs(above)
    for name in sorted(devices_at, key=lambda each: (each.count("."), each)):
        module = plan.model.get_submodule(name)
        device = devices_at[name]
        of_unit = groups.get(name, [])
        above = _hooked_above(name.rpartition(".")[0], devices_at)
        if name == "" or plan.within_block(name):
            back = True
        elif name in plan.blocks:
            # What blocks put out flows on from device to device, unless they are parts of something that runs elsewhere.
            back = above != "" and devices_at[above] != device
        else:
            back = devices_at[above] != device
        hook = DispatchHook(
            execution_device=device,
            offload=bool(of_unit),
            io_same_device=back,
            skip_keys=skip_keys,
            place_submodules=name in plan.units,
            tied_params_map=tied_params_map,
        )
        at_rest = [
            group for group in of_unit if reads_rows_only(module) and all(isinstance(slot.resting, LazyTensor) for slot in group.slots)
        ]
        around = None if name == "" else devices_at[above]
        hook.prepare(state.schedule, [group for group in of_unit if group not in at_rest], at_rest, module, name, around)
        add_hook_to_module(module, hook, append=True)
        state.hooks(module)
    for module in state.hooked:
        hooks = [hook for hook in hooks_of(module) if isinstance(hook, DispatchHook)]
        hooks[-1].watch(module)


def _hooked_above(name: str, hooked: Collection[str]) -> str:
    """The nearest hooked module that `name` is, or is in; the root is always hooked."""
    while name not in hooked:
        name = name.rpartition(".")[0]
    return name


def _strip(model: nn.Module) -> list[DispatchHook]:
    """Takes an earlier dispatch off; what is offloaded stays a placeholder. Returns its hooks, which have yet to be released."""
    state = dispatched(model)
    if state is None:
        return []
    state.end(model)
    taken: list[DispatchHook] = []
    for module in state.hooked:
        kept = [hook for hook in hooks_of(module) if not isinstance(hook, DispatchHook)]
        taken += [hook for hook in hooks_of(module) if isinstance(hook, DispatchHook)]
        _keep_hooks(module, kept)
    return taken


def _release(hooks: Iterable[DispatchHook]) -> None:
    for hook in hooks:
        hook.release()


def _keep_hooks(module: nn.Module, kept: list[ModelHook]) -> None:
    """Leaves only the given hooks on a module, without detaching or initializing them."""
    if kept:
        module._hf_hook = kept[0] if len(kept) == 1 else SequentialHook(*kept)  # type: ignore[assignment]
        return
    if hasattr(module, "_hf_hook"):
        module._hf_hook = ModelHook()  # type: ignore[assignment]
        remove_hook_from_module(module)


def undispatch(model: nn.Module) -> nn.Module:
    """Gives the plain model back: all hooks of `dispatch` are off, all offloaded weights are parameters again, ties kept. Returns it.

    Weights come back to where they were before they were offloaded; what was on meta comes to CPU. Raises `DispatchError`, with nothing
    changed, if there is not enough memory for them (the message says how much is missing).
    """
    state = dispatched(model)
    if state is not None:
        restore(state.schedule.groups)
        _release(_strip(model))
    return model
