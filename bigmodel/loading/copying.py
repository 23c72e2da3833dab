"""The last step of a read: staged bytes into the elements that they become."""

from __future__ import annotations

import torch

from .ranges import Range

__all__ = ["copy_rounded", "put_range"]


def put_range(each: Range, staged: torch.Tensor, destination: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copies the bytes of a range (uint8, as they lie in the file) into a flat destination, on whatever device each of them is."""
    assert each.dims is not None
    sizes = [size for size, _, _ in each.dims]
    values = staged.view(each.dtype).as_strided(sizes, [source for _, source, _ in each.dims])
    place = destination.as_strided(sizes, [target for _, _, target in each.dims], destination.storage_offset() + each.first)
    copy_rounded(place, values, each.rounded, non_blocking=non_blocking)


def copy_rounded(place: torch.Tensor, values: torch.Tensor, rounded: torch.dtype, *, non_blocking: bool = False) -> None:
    """Copies with a cast that passes through `rounded` where that is neither side's dtype."""
    if rounded not in (values.dtype, place.dtype):
        values = values.to(rounded)
    place.copy_(values, non_blocking=non_blocking)
