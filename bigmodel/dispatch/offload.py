"""Taking the weights out of modules: what rests where, placeholders in their place, and the way back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..devices import available_host_bytes, device_memory
from ..errors import DispatchError
from ..modules import named_module_tensors, owner_of
from ..protocols import Store
from .group import Group
from .layout import Owner, Slot
from .lazy import LazyTensor
from .origin import Origin, Tally
from .placeholder import Placeholder
from .pool import Pool

__all__ = ["Prefixed", "Resting", "WeightsMap", "check_rests", "make_group", "placeholder_for", "restore", "set_tensor", "swap_in_values"]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Resting:
    """A tensor that is to be offloaded: where it is registered, and where its bytes rest."""

    name: str
    owners: list[Owner]
    tensor: torch.Tensor
    store: Store | None
    """None for a tensor that is a placeholder already, or that stays a real tensor on another device."""
    key: str = ""
    """Its name in the store."""
    modified: bool = False
    """Whether its values were written by somebody, and are kept nowhere else."""


def check_rests(name: str, tensor: torch.Tensor, store: Store, key: str) -> None:
    """Raises `DispatchError` if what the store keeps as `key` cannot stand for `tensor`."""
    spec = store.spec(key)
    if tuple(spec.shape) != tuple(tensor.shape):
        raise DispatchError(f"{name} has shape {tuple(tensor.shape)} in the model and {tuple(spec.shape)} where its weights rest.")


def placeholder_for(resting: Resting, device: torch.device, tally: Tally) -> torch.Tensor:
    """The placeholder that all owners of a tensor share; one that is there already goes on to serve."""
    tensor = resting.tensor
    if isinstance(tensor, LazyTensor):
        tensor.origin.device = device
        tensor.origin.tally = tally
        return tensor
    assert resting.store is not None
    check_rests(resting.name, tensor, resting.store, resting.key)
    casts = () if resting.store.spec(resting.key).dtype == tensor.dtype else (tensor.dtype,)
    origin = Origin(resting.store, resting.key, device, casts=casts, tally=tally, label=resting.name)
    origin.modified = resting.modified
    if resting.owners[0].is_buffer:
        return LazyTensor.of(origin)
    made = Placeholder.of(origin, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def make_group(name: str, tensors: Iterable[Resting], pool: Pool, tally: Tally, *, beside: bool = False) -> Group:
    """Takes the tensors out of their modules and makes the group that brings them to the pool's device for a forward.

    `beside` says that it will be in use while other groups are.
    """
    slots = []
    for resting in tensors:
        tensor = resting.tensor
        stays = resting.store is None and not isinstance(tensor, LazyTensor)
        stand_in = tensor if stays else placeholder_for(resting, pool.device, tally)
        is_buffer = resting.owners[0].is_buffer
        parameter_class = None if is_buffer else nn.Parameter if isinstance(tensor, Placeholder) else type(tensor)
        if isinstance(tensor, Placeholder):
            parameter_class = tensor.__dict__.get("parameter_class", nn.Parameter)
        elif isinstance(stand_in, Placeholder) and type(tensor) is not nn.Parameter:
            stand_in.__dict__["parameter_class"] = type(tensor)
        for owner in resting.owners:
            owner.table[owner.attribute] = stand_in
        original = CPU if tensor.device.type == "meta" else tensor.device
        slots.append(Slot(resting.name, list(resting.owners), stand_in, parameter_class, original))
    return Group(name, slots, pool, beside=beside)


def set_tensor(owners: Iterable[Owner], value: torch.Tensor) -> None:
    """Registers one and the same object with all owners."""
    for owner in owners:
        owner.table[owner.attribute] = value


def _needs_bytes(slot: Slot) -> int:
    lazy = slot.resting
    if not isinstance(lazy, LazyTensor) or (slot.original_device.type == "cpu" and lazy.origin.lender() is not None):
        return 0
    return slot.nbytes


def restore(groups: Iterable[Group]) -> None:
    """Puts the weights of the groups back into their modules as plain parameters, where they were before.

    Raises `DispatchError`, before anything is changed, if a device has less memory free than they take.
    """
    groups = list(groups)
    needed: dict[torch.device, int] = {}
    for group in groups:
        if group.in_use:
            raise DispatchError(f"The weights of {group.name or 'the model'} are in use by a forward: take the hooks off when it is over.")
        for slot in group.slots:
            needed[slot.original_device] = needed.get(slot.original_device, 0) + _needs_bytes(slot)
    for device, nbytes in needed.items():
        free = available_host_bytes() if device.type == "cpu" else device_memory(device)[0]
        if nbytes > free:
            raise DispatchError(
                f"The offloaded weights take {nbytes} bytes on {device}, where {free} are free: {nbytes - free} are missing. "
                "Leave the model dispatched, or free memory first."
            )
    for group in groups:
        for slot in group.slots:
            if isinstance(slot.resting, LazyTensor):
                _restore_slot(slot, slot.resting)


def _on_cpu(lazy: LazyTensor) -> torch.Tensor:
    """The values on CPU: the resting tensor itself where it lies there, a copy otherwise."""
    lend = lazy.origin.lender()
    return lazy.origin.fetch(CPU) if lend is None else lend(lazy.origin.name)


def _restore_slot(slot: Slot, lazy: LazyTensor) -> None:
    owners = [owner for owner in slot.owners if owner.tensor is lazy]
    if not owners:
        return
    restored = lazy.origin.restored() if lazy.origin.restored is not None else None
    if restored is None:
        value = _on_cpu(lazy).to(slot.original_device)
        if slot.parameter_class is None:
            restored = value
        else:
            restored = torch.Tensor._make_subclass(slot.parameter_class, value, lazy.requires_grad)
            restored.__dict__.update({key: item for key, item in lazy.__dict__.items() if key not in ("origin", "parameter_class")})
        lazy.origin.restored = weakref.ref(restored)
    set_tensor(owners, restored)


class WeightsMap(Mapping[str, torch.Tensor]):
    """The offloaded tensors below a module as a mapping from names relative to it to real tensors on CPU; reading one fetches it.

    Libraries find it as `module._hf_hook.weights_map`. A tensor that rests in RAM is given as it is, without a copy.
    """

    def __init__(self, module: nn.Module, path: str = "") -> None:
        self._module = weakref.ref(module)
        self._path = f"{path}." if path else ""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsMap:
        return WeightsMap(deepcopy(self.module, memo), self._path[:-1])

    @property
    def module(self) -> nn.Module:
        """The module that names are relative to."""
        module = self._module()
        if module is None:
            raise DispatchError("The model that these weights belong to is gone.")
        return module

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._value(name)
        except KeyError:
            # transformers makes the relative name by removing the module's path wherever it occurs: "embeddings.word_embeddings.weight"
            # becomes "word_weight".
            for own in self if self._path else ():
                if (self._path + own).replace(self._path, "") == name:
                    return self._value(own)
            raise

    def _value(self, name: str) -> torch.Tensor:
        try:
            owner, attribute = owner_of(self.module, name)
        except AttributeError:
            raise KeyError(name) from None
        tensor = owner._parameters.get(attribute, owner._buffers.get(attribute))
        if tensor is None:
            raise KeyError(name)
        if isinstance(tensor, LazyTensor):
            return _on_cpu(tensor)
        return tensor.detach()

    def __iter__(self) -> Iterator[str]:
        for name, tensor in named_module_tensors(self.module, recurse=True):
            if isinstance(tensor, LazyTensor):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in set(self)


class Prefixed(Mapping[str, torch.Tensor]):
    """The part of a mapping whose names begin with a prefix, which is left out of them."""

    def __init__(self, mapping: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._mapping = mapping
        self._prefix = prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._mapping[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in self._mapping if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@contextlib.contextmanager
def swap_in_values(table: dict[str, torch.Tensor | None], device: torch.device | None) -> Iterator[None]:
    """Within the context the tensors of a module's dict are real and on `device` (None: where each runs, or is)."""
    swapped: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []
    try:
        for name, tensor in list(table.items()):
            if tensor is None:
                continue
            if isinstance(tensor, LazyTensor):
                value = tensor.origin.fetch(device)
            elif device is None or tensor.device == device or tensor.device.type == "meta":
                continue
            else:
                value = tensor.detach().to(device)
            real = nn.Parameter(value, tensor.requires_grad and value.is_floating_point()) if isinstance(tensor, nn.Parameter) else value
            table[name] = real
            swapped.append((name, tensor, real, real._version))
        yield
    finally:
        for name, tensor, real, version in swapped:
            if table.get(name) is real:
                table[name] = tensor
                if real._version != version:
                    with torch.no_grad():
                        tensor.copy_(real)
