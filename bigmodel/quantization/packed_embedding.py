"""A packed embedding table, of which a lookup unpacks its rows and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .packed_format import PackedFormat
from .packed_weight import PackedWeight

__all__ = ["PackedEmbedding", "packed_table"]


class PackedEmbedding(PackedWeight, nn.Embedding):
    """An `nn.Embedding` whose rows are unpacked when they are looked up, to `original_dtype`."""

    looks_up_rows: ClassVar[bool] = True
    """Its forward reads single rows of its tensors, so that they can rest elsewhere (`bigmodel.modules.reads_rows_only`)."""

    def __init__(self, shape: tuple[int, int], packing: PackedFormat, original_dtype: torch.dtype, padding_idx: int | None = None) -> None:
        super().__init__(*shape, padding_idx=padding_idx, device="meta")
        self.packing, self.original_dtype = packing, original_dtype
        self._fill_with_meta()

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table, were it not packed."""
        return (self.num_embeddings, self.embedding_dim)

    def specs(self) -> dict[str, Any]:
        """Of the packed tensors, by attribute."""
        return self.packing.table(self.shape) or {}

    def original_name(self, name: str) -> str:
        """Full name of the table before it was packed, where the module is called `name`."""
        return f"{name}.weight"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input (…) of row numbers → (…, embedding_dim), of `original_dtype`."""
        rows = self.packing.look_up(self.packed_tensors(), self.embedding_dim, input.reshape(-1), self.original_dtype)
        return rows.view(*input.shape, self.embedding_dim)

    def unpacked(self) -> torch.Tensor:
        """The table (rows, columns), of `original_dtype`, that the packed bytes stand for."""
        tensors = {name: tensor.detach() for name, tensor in self.packed_tensors().items()}
        return self.packing.unpack(tensors, self.shape, self.original_dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves the packed tensors; a cast is about the rows that are unpacked from now on."""
        super()._apply(fn, recurse)
        self.original_dtype = fn(torch.empty(0, dtype=self.original_dtype)).dtype
        return self


def packed_table(embedding: nn.Embedding, packing: PackedFormat, original_dtype: torch.dtype) -> PackedEmbedding:
    """The packed embedding, on meta, that takes the place of `embedding`."""
    shape = (embedding.num_embeddings, embedding.embedding_dim)
    table = PackedEmbedding(shape, packing, original_dtype, embedding.padding_idx)
    table.train(embedding.training)
    return table
