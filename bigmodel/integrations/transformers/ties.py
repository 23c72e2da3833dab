"""Which weights are really one: the configuration says what may be tied, the checkpoint what is."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ...constants import MiB
from ...loading import Checkpoint, Reader, Source, Transfer
from ...loading.transfer import lower
from .initialize import set_tensor

__all__ = ["untie_different"]

logger = logging.getLogger(__name__)

_COMPARED_BYTES = 32 * MiB
"""Compared at once: what is held of each of the two tensors."""


def untie_different(model: Any, checkpoint: Checkpoint, sources: dict[str, Source]) -> list[str]:
    """Takes weights apart that the configuration ties but of which the checkpoint holds two with different values.

    Such a checkpoint contradicts its configuration; transformers believes the values, and so does bigmodel, with a warning. Returns the
    names of the weights that are their own now. The model's weights are on meta.
    """
    apart = []
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in sources or source not in sources or sources[target] == sources[source]:
            continue
        weight = model.get_parameter(target)
        first, second = (lower(sources[name], checkpoint.entries, name, weight.dtype) for name in (source, target))
        if _equal(first, second, weight.dtype, checkpoint):
            continue
        set_tensor(model, target, nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad))
        del model.all_tied_weights_keys[target]
        apart.append(target)
        logger.warning(
            "%s: the configuration ties %s to %s, but the checkpoint holds different values for them. They are not tied. "
            "`tie_word_embeddings=False` in the configuration silences this warning.",
            checkpoint.location,
            target,
            source,
        )
    return apart


def _equal(first: Transfer, second: Transfer, dtype: torch.dtype, checkpoint: Checkpoint) -> bool:
    """Whether both give the same values in `dtype`; read piece by piece."""
    if first.shape != second.shape:
        return False
    if first.pieces == second.pieces:
        return True
    reader = Reader(checkpoint.identities)
    try:
        rows = first.shape[0] if first.shape else 1
        row_bytes = max(1, first.nbytes // max(1, rows))
        step = max(1, _COMPARED_BYTES // row_bytes)
        for start in range(0, rows, step):
            parts = [transfer.rows(start, min(step, rows - start)) if first.shape else transfer for transfer in (first, second)]
            values = [torch.empty(part.shape, dtype=dtype) for part in parts]
            reader.read(list(zip(parts, values, strict=True)))
            if not torch.equal(*values):
                return False
        return True
    finally:
        reader.close()
