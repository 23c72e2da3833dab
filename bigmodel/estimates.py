"""How large a model is in several dtypes, told from whatever is known of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from .planning.items import find_items
from .planning.sizes import tensor_bytes_rule
from .plans import buildable_dtype, split_dtype
from .sources import Wanted, find_tree

__all__ = ["Estimate", "estimate_memory"]

OTHER_NAMES: Final = {"int4": "nf4"}
"""Words that say how many bits a weight has, and the packed format that is meant."""

COPIES: Final = 3
"""Of trained weights in memory, beside themselves: gradients, and Adam's two moments (https://arxiv.org/abs/1412.6980)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model in one dtype."""

    dtype: str
    """As it was asked for."""
    total_bytes: int
    """Every tensor once."""
    largest_bytes: int
    """Of what is never split across devices: what an accelerator has to hold at least."""
    largest: str
    """Name of the first block, or layer outside of blocks, of that size."""
    training_bytes: int | None
    """Weights, gradients and both moments of Adam in this dtype, without activations; None: nothing trains in it."""
    notes: tuple[str, ...] = ()
    """What had to be assumed."""


def estimate_memory(
    source: nn.Module | str | os.PathLike[str] | Any, dtypes: Sequence[str], *, trust_remote_code: bool = False
) -> list[Estimate]:
    """The sizes that a model has once loaded, one for each of `dtypes`; no weights are read.

    Args:
        source: as in `bigmodel.plan`.
        dtypes: names of dtypes or packed formats; `"int4"` is `"nf4"`.
        trust_remote_code: whether code that lies beside a checkpoint may run.

    Raises the errors of `bigmodel.plan`.
    """
    return [_estimate(source, dtype, trust_remote_code) for dtype in dtypes]


def _estimate(source: Any, dtype: str, trust_remote_code: bool) -> Estimate:
    packed, plain = split_dtype(OTHER_NAMES.get(dtype, dtype), None)
    trained = buildable_dtype(plain)
    tree = find_tree(source, Wanted(trained, plain is not None, trust_remote_code=trust_remote_code))
    rule = tensor_bytes_rule(
        None if tree.is_built and trained else plain, packed_sizes=None if packed is None else packed.packed_sizes(tree.model)
    )
    inventory = find_items(tree.model, rule)
    sizes = {item.name: sum(inventory.nbytes[tensor] for tensor in item.tensors) for item in inventory.items}
    largest = max(sizes, key=lambda name: sizes[name])
    parameter_bytes = inventory.total_bytes - sum(inventory.nbytes[tensor] for tensor in inventory.buffers)
    return Estimate(
        dtype,
        inventory.total_bytes,
        sizes[largest],
        largest,
        inventory.total_bytes + COPIES * parameter_bytes if trained else None,
        tree.notes,
    )
