"""What autograd keeps of offloaded weights for the backward: where they rest, not their bytes, so that their memory is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import DispatchError
from .group import Group
from .lazy import LazyTensor, version_of
from .origin import Origin

__all__ = ["recalled"]


@dataclass(frozen=True, slots=True)
class _Recall:
    """A view of an offloaded weight that the backward will need."""

    group: Group
    generation: int
    origin: Origin
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from the weight's first one."""

    def value(self) -> torch.Tensor:
        if self.group.generation != self.generation:
            raise DispatchError(
                f"{self.origin.label} was changed between the forward and its backward: gradients would be those of other weights."
            )
        pager = self.origin.pager() if self.group.pool.device.type == "cpu" else None
        with torch.no_grad():
            whole = self.origin.fetch() if pager is None else pager.pages([self.origin.name])[0]
            return whole.as_strided(self.size, self.stride, self.offset)


class _Kept(NamedTuple):
    """Any other tensor. Autograd does not watch the versions of what hooks pack, so that is done here."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kept:
        # Without its graph: an output that is saved for its own backward would otherwise keep itself alive.
        return cls(tensor.detach(), version_of(tensor))

    def value(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} needed for the backward has been modified by an inplace operation: it is at "
                f"version {version_of(self.tensor)}, expected version {self.version}."
            )
        return self.tensor


def recalled(groups: Sequence[Group]) -> Any:
    """A context in which autograd saves weights of `groups` by name and fetches them again in the backward; None where nothing is saved.

    Other tensors are saved as they would have been: hooks that are in force around it (`save_on_cpu`, checkpointing) get them.
    """
    if not groups or not torch.is_grad_enabled():
        return None
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # function transforms allow no such hooks: what they save keeps the memory
    around = autograd._top_saved_tensors_default_hooks(True)
    pack_around: Callable[[torch.Tensor], Any] | None = around[0] if around else None
    unpack_around: Callable[[Any], torch.Tensor] | None = around[1] if around else None

    def pack(tensor: torch.Tensor) -> Any:
        found = _find(groups, tensor)
        if found is not None:
            return found
        return pack_around(tensor) if pack_around is not None else _Kept.of(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        if unpack_around is None or isinstance(saved, _Recall):
            value: torch.Tensor = saved.value()
            return value
        return unpack_around(saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _find(groups: Sequence[Group], tensor: torch.Tensor) -> _Recall | None:
    """The weight of which `tensor` is a view, if it lies in the memory that a group passes through."""
    if isinstance(tensor, LazyTensor):
        return None
    try:
        storage = tensor.untyped_storage()._cdata
    except NotImplementedError:  # tensors without memory of their own (sparse, wrapped)
        return None
    for group in groups:
        found = group.place_of(storage, int(tensor.storage_offset()) * tensor.element_size(), tensor.dtype)
        if found is not None:
            slot, offset = found
            assert isinstance(slot.resting, LazyTensor)
            origin = slot.resting.origin
            return _Recall(group, group.generation, origin, tensor.shape, tensor.stride(), offset // tensor.element_size())
    return None
