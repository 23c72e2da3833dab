"""Where each tensor of a model goes: resident on a device, or offloaded to RAM or disk and brought to where it is used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ..errors import DispatchError
from ..protocols import PagedStore, Store
from .cut import Cut, Registered
from .layout import Owner
from .lazy import LazyTensor
from .offload import check_rests
from .stores import ResidentStore

__all__ = ["Decision", "decide"]


@dataclass(slots=True)
class Decision:
    """Where one tensor goes. `home` is the device where it is resident, or None if it is offloaded."""

    tensor: Registered
    home: torch.device | None
    kind: str
    """What it is offloaded to, `"cpu"` or `"disk"`."""
    store: Store | None
    """What its values are read from, under `key`; None where they are in the model."""
    key: str
    away: dict[torch.device, list[tuple[str, Owner]]]
    """The places that use it on another device than its home, by device."""

    def passing_bytes(self, device: torch.device) -> int:
        """Bytes of the ring on `device` that it takes while it is used there."""
        tensor = self.tensor.tensor
        if self.home is not None or (device.type == "cpu" and self._is_lent()):
            return 0
        return tensor.numel() * tensor.element_size()

    def _is_lent(self) -> bool:
        """Whether arithmetic on the CPU uses it where it rests."""
        tensor = self.tensor.tensor
        if self.store is None or self.kind == "cpu":
            return not isinstance(tensor, LazyTensor) or tensor.origin.lender() is not None or tensor.origin.pager() is not None
        is_there = isinstance(self.store, ResidentStore) or (isinstance(self.store, PagedStore) and self.store.is_paged(self.key))
        return is_there and self.store.spec(self.key).dtype == tensor.dtype


def decide(plan: Cut, tensor: Registered, store: Store | None, known: Collection[str], offload_buffers: bool) -> Decision:
    """Decides for one tensor. `known` are the names in the store.

    Raises `DispatchError` where the tensor is on meta or mapped to disk and nothing keeps it.
    """
    stays = tensor.is_buffer and not (offload_buffers and tensor.persistent)
    # A module that stands in several places runs on one device, that of its first name.
    uses = [(places[0][0], places) for places in tensor.by_owner()]
    rests = ["resident" if stays else plan.rests(name) for name, _ in uses]
    # A tie of which one end is resident is resident: its bytes are there anyway.
    home = next((plan.tensor_runs(name) for (name, _), where in zip(uses, rests, strict=True) if where == "resident"), None)
    away: dict[torch.device, list[tuple[str, Owner]]] = {}
    for name, places in uses:
        device = plan.tensor_runs(name)
        if device != home:
            away.setdefault(device, []).extend(places)
    key = next((name for name in tensor.names if name in known), "")
    lazy = isinstance(tensor.tensor, LazyTensor)
    on_meta = not lazy and tensor.tensor.device.type == "meta"
    if key and store is not None and (on_meta or home is None):
        check_rests(tensor.name, tensor.tensor, store, key)
    if on_meta and not key:
        if tensor.is_buffer and not tensor.persistent:
            raise DispatchError(
                f"The buffer {tensor.name} is on meta and not part of any checkpoint: compute it (build the model with its buffers on CPU) "
                "before dispatching."
            )
        raise DispatchError(
            f"{tensor.name} is on meta and rests nowhere: load it, or pass a store that keeps it (tried {', '.join(tensor.names)})."
        )
    if home is not None:
        return Decision(tensor, home, "", store if on_meta else None, key, away)
    # Of a tie that is mapped to both, what the disk does not keep rests in RAM.
    kind = "cpu" if "cpu" in rests and not key else rests[0]
    if kind == "disk" and not key and not lazy:
        raise DispatchError(
            f"{tensor.name} is mapped to disk, but nothing on disk keeps it: offload it to a folder first, or map it to 'cpu' (by the "
            f"entry {plan.entry(uses[0][0])!r} of the device map)."
        )
    return Decision(tensor, None, kind, store if key and (on_meta or kind == "disk") else None, key, away)
