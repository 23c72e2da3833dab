"""Where the tensors of a group are registered, where they rest, and where they lie while a forward uses them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..constants import GROUP_ALIGNMENT_BYTES
from ..protocols import PagedStore, Read, Store
from .lazy import LazyTensor
from .origin import Origin

__all__ = ["Layout", "Owner", "Reading", "Slot", "lay_out", "swap_parameter"]


def swap_parameter(cls: type[torch.Tensor] | None, value: torch.Tensor, like: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    """`value` as a parameter of class `cls` with the attributes that `like` carries; `value` itself for a buffer (None)."""
    if cls is None:
        return value
    made: torch.Tensor = torch.Tensor._make_subclass(cls, value, requires_grad)
    attributes = like.__dict__
    if len(attributes) > 1 or "origin" not in attributes:
        made.__dict__.update({key: attribute for key, attribute in attributes.items() if key not in ("origin", "parameter_class")})
    return made


class Owner:
    """One place where a tensor is registered. It does not keep the module alive: hooks of the module refer to it."""

    __slots__ = ("_module", "attribute", "is_buffer", "table")

    table: dict[str, Any]
    """The module's own dict of parameters, or of buffers."""

    def __init__(self, module: nn.Module, attribute: str, is_buffer: bool = False) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute
        self.is_buffer = is_buffer

    @property
    def module(self) -> nn.Module | None:
        """The module; None once it is gone."""
        return self._module()

    def __getattr__(self, name: str) -> Any:
        # The table is looked up late, and once: a module that is being copied has none yet, and forwards ask for it several times.
        if name != "table":
            raise AttributeError(name)
        module: Any = self._module()
        self.table = {} if module is None else module._buffers if self.is_buffer else module._parameters
        return self.table

    def copied(self, memo: dict[int, Any]) -> Owner:
        """The same place in the copy of the module."""
        module = self._module()
        assert module is not None
        return Owner(deepcopy(module, memo), self.attribute, self.is_buffer)

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is registered there now."""
        return self.table.get(self.attribute)


@dataclass(slots=True)
class Slot:
    """One tensor of a group."""

    name: str
    """Full name in the model, the first one if it has several."""
    owners: list[Owner]
    resting: torch.Tensor
    """What all owners hold between forwards: a placeholder, or a real tensor that is resident on another device."""
    parameter_class: type[torch.Tensor] | None
    """The class that the tensor has in a forward; None for a buffer."""
    original_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where it was before it was offloaded; CPU for a tensor that was on meta."""

    @property
    def nbytes(self) -> int:
        return self.resting.numel() * self.resting.element_size()


class Place(NamedTuple):
    slot: Slot
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Reading:
    """What fills a flat buffer with a group's weights. It knows no module, so that a read under way keeps no model alive."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        """The group's generation that it is right for."""
        self.nbytes = 0
        self._entries: list[tuple[int, torch.Size, tuple[int, ...], torch.dtype, Origin]] = []

    def add(self, origin: Origin, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> int:
        """One more tensor; returns its offset in the buffer (bytes)."""
        offset = self.nbytes
        self._entries.append((offset, shape, stride, dtype, origin))
        nbytes = math.prod(shape) * dtype.itemsize
        self.nbytes += -(-nbytes // GROUP_ALIGNMENT_BYTES) * GROUP_ALIGNMENT_BYTES
        return offset

    def fill(self, flat: torch.Tensor) -> None:
        """Fills `flat` (uint8, on CPU, at least `nbytes`). Nothing is locked: threads may do so at once."""
        storage = flat.untyped_storage()
        first = flat.storage_offset()
        requests: dict[int, tuple[Store, list[Read]]] = {}
        with torch.no_grad():
            for offset, shape, stride, dtype, origin in self._entries:
                destination = torch.empty(0, dtype=dtype, device="cpu").set_(storage, (first + offset) // dtype.itemsize, shape, stride)
                request = origin.read_request(destination)
                if request is None:
                    origin.read(destination)
                else:
                    requests.setdefault(id(request[0]), (request[0], []))[1].append(request[1])
            for store, reads in requests.values():
                store.read_into(reads)


class InPlace:
    """A slot that needs no place in a flat buffer: its tensor is used where it lies.

    The parameter that a forward computes with is made once: it is the same memory in every forward.
    """

    __slots__ = ("_address", "_made", "_value", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._value: torch.Tensor | None = None
        self._made: torch.Tensor | None = None
        self._address = 0

    def real(self, value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """What takes the place of the resting tensor, whose bytes are `value`."""
        made = self._known(requires_grad)
        if made is not None and self._value is value:
            return made
        slot = self.slot
        resting = slot.resting
        made = swap_parameter(slot.parameter_class, value, resting, requires_grad)
        if len(resting.__dict__) == 1 and type(made) is nn.Parameter:  # no attributes, which may change
            self._value, self._made, self._address = value, made, made.data_ptr()
        return made

    def _known(self, requires_grad: bool) -> torch.Tensor | None:
        made = self._made
        # A forward may have given the parameter other data, or asked for its gradient.
        if made is not None and made.requires_grad == requires_grad and made.data_ptr() == self._address:
            return made
        return None


class Lent(InPlace):
    """One whose tensor lies in RAM where the arithmetic runs. Which one it is changes only with the group's layout."""

    __slots__ = ("_lend",)

    def __init__(self, slot: Slot, lend: Callable[[str], torch.Tensor]) -> None:
        super().__init__(slot)
        self._lend = lend

    def lent(self, requires_grad: bool) -> torch.Tensor:
        """What takes the place of the resting tensor."""
        made = self._made  # as in `_known`, without a call: tiny layers are many
        if made is not None and made.requires_grad == requires_grad and made.data_ptr() == self._address:
            return made
        resting = self.slot.resting
        assert isinstance(resting, LazyTensor)
        return self.real(self._lend(resting.origin.name), requires_grad)


class Paged(NamedTuple):
    """Tensors on mapped pages of the files of one store."""

    store: PagedStore
    names: list[str]
    places: list[InPlace]


class Layout(NamedTuple):
    places: list[Place]
    reading: Reading
    lent: list[Lent]
    paged: list[Paged]
    """By store."""
    paged_bytes: int
    travels: bool
    """Whether its bytes are worth being brought ahead: they are not in RAM where the arithmetic runs."""
    elsewhere: list[Slot]
    """Slots that rest on another device as real tensors."""


def lay_out(slots: Iterable[Slot], device: torch.device, generation: int) -> Layout:
    """Where the tensors of `slots` lie while a forward on `device` uses them."""
    places: list[Place] = []
    lent: list[Lent] = []
    paged: dict[int, Paged] = {}
    elsewhere: list[Slot] = []
    reading = Reading(generation)
    for slot in slots:
        resting = slot.resting
        if not isinstance(resting, LazyTensor):
            elsewhere.append(slot)
            continue
        lender = resting.origin.lender() if device.type == "cpu" else None
        if lender is not None:
            lent.append(Lent(slot, lender))
            continue
        pager = resting.origin.pager() if device.type == "cpu" else None
        if pager is not None:
            of_store = paged.setdefault(id(pager), Paged(pager, [], []))
            of_store.names.append(resting.origin.name)
            of_store.places.append(InPlace(slot))
            continue
        shape, dtype = resting.shape, resting.dtype
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        places.append(Place(slot, reading.add(resting.origin, shape, stride, dtype), shape, stride, dtype))
    paged_bytes = sum(place.slot.nbytes for of_store in paged.values() for place in of_store.places)
    return Layout(places, reading, lent, list(paged.values()), paged_bytes, reading.nbytes + paged_bytes > 0, elsewhere)
