"""What the main process hands to each process, out of the batches that it has read for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from ...errors import TrainingError
from .rows import cut_rows, flatten, join_rows, rebuild, row_count

__all__ = ["Sharing", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A batch for each share."""

    pieces: list[Any]
    real: int
    """Samples of all pieces that are no repeats, where some are; 0: none is repeated; -1: some are, and nobody can tell how many."""


class Sharing:
    """Shares out one epoch.

    Batches of one size, one for each share, are handed out as they are, whatever is in them. Others are joined, filled with samples from
    the start of the data to a multiple of the shares, and cut into equal parts. Those that cannot be joined (texts padded to other
    lengths) are handed out as they are too, with batches from the start of the data for the shares that would have none.

    Args:
        shares: into how many parts.
        keeps_start: remember the first samples of the data, to fill with.
        cut: another way to cut, `cut(batch, slice, process_index=, num_processes=)`; then everything is joined and cut.
    """

    def __init__(self, shares: int, keeps_start: bool, cut: Callable[..., Any] | None = None):
        self.shares = shares
        self.keeps_start = keeps_start
        self.cut = cut
        self.start_rows: Any = None
        self.start_batches: list[Any] = []

    def remember(self, group: list[Any]) -> None:
        """Keeps what later batches may have to be filled with, if `group` is the first."""
        if not self.keeps_start or self.start_rows is not None or self.start_batches:
            return
        parts: list[Any] = []
        missing = self.shares
        for batch in group:
            rows = row_count(batch)
            if rows is None:
                break
            if missing > 0:
                parts.append(cut_rows(batch, slice(0, missing)))
                missing -= rows
        joined = join_rows(parts) if parts else None
        if joined is None:
            self.start_batches = list(group)
        else:
            leaves: list[Any] = []
            structure = flatten(joined, leaves)
            # A view would keep the whole batch.
            self.start_rows = rebuild(structure, [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def share(self, group: list[Any], splits: bool) -> Step:
        """The pieces of the next step.

        Args:
            group: the batches read for it: one if it is to be split, else up to one a share.
            splits: a batch is for all shares together.

        Raises:
            TrainingError: a batch to be split that has no common number of samples.
        """
        self.remember(group)
        counts = [row_count(batch) for batch in group]
        if self.cut is None and len(group) == self.shares and len(set(counts)) == 1:
            return Step(group, 0)
        total = None if None in counts else sum(count for count in counts if count is not None)
        joined = join_rows(group) if len(group) > 1 else group[0]
        if total and joined is not None:
            return self._cut_up(joined, total)
        if splits:
            raise TrainingError(
                f"A batch ({type(group[0]).__name__}) whose parts have no common number of samples cannot be split between "
                f"{self.shares} processes: leave `split_batches` out, or let `collate_fn` make a list of samples."
            )
        missing = self.shares - len(group)
        start = self.start_batches or ([] if self.start_rows is None else [self.start_rows]) or group
        pieces = [*group, *islice(cycle(start), missing)]
        return Step(pieces, 0 if not missing else -1 if total is None else total)

    def _cut_up(self, joined: Any, total: int) -> Step:
        missing = -total % self.shares
        if missing:
            filled = None if self.start_rows is None else join_rows([joined, _taken(self.start_rows, missing)])
            joined = join_rows([joined, _taken(joined, missing)]) if filled is None else filled
        each = (total + missing) // self.shares
        slices = [slice(each * share, each * (share + 1)) for share in range(self.shares)]
        if self.cut is None:
            pieces = [cut_rows(joined, rows) for rows in slices]
        else:
            pieces = [self.cut(joined, rows, process_index=share, num_processes=self.shares) for share, rows in enumerate(slices)]
        return Step(pieces, total if missing else 0)


def _taken(batch: Any, count: int) -> Any:
    """`count` samples of the batch, over and over where there are too few."""
    rows = row_count(batch)
    assert rows
    return cut_rows(join_rows([batch] * -(-count // rows)) if count > rows else batch, slice(0, count))
