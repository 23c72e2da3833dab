"""The disk tier: offloaded tensors rest in the checkpoint that they came with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..protocols import Read, TensorSpec
from .entry import FileIdentity
from .location import CheckpointFile
from .pages import MappedPages
from .private_folder import PrivateFolder
from .ranges import ReadPlan, plan_reads
from .reader import Reader
from .transfer import Transfer

__all__ = ["CheckpointStore"]


class CheckpointStore:
    """Reads tensors from the files of a checkpoint, as a `bigmodel.protocols.Store`, or maps them, as a `PagedStore`.

    Nothing is ever written to the files: a tensor that is replaced lives in RAM from then on. A copy (`copy.deepcopy`) has replacements of
    its own and shares the open files; a pickled one opens them again.
    """

    def __init__(
        self,
        transfers: Mapping[str, Transfer],
        identities: Mapping[CheckpointFile, FileIdentity] | None = None,
        folder: PrivateFolder | None = None,
        *,
        map_files: bool | None = None,
    ) -> None:
        """`folder` holds some of the files and is removed with the last store that reads them. `map_files`: see `pages.MappedPages`."""
        self._folder = folder
        self._transfers = dict(transfers)
        self._reader = Reader(identities)
        self._pages = MappedPages(self._reader.files, map_files)
        self._replaced: dict[str, torch.Tensor] = {}
        self._plans: dict[tuple[tuple[str, torch.dtype], ...], ReadPlan] = {}

    @property
    def kind(self) -> str:
        """Always `"disk"`."""
        return "disk"

    @property
    def transfers(self) -> Mapping[str, Transfer]:
        """What each tensor is read from."""
        return self._transfers

    def names(self) -> Collection[str]:
        """The full names of the tensors kept here."""
        return self._transfers.keys()

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype that `name` is read with by default. Raises KeyError."""
        transfer = self._transfers[name]
        return TensorSpec(transfer.shape, transfer.dtype)

    def read_into(self, reads: Sequence[Read]) -> None:
        """Fills every destination. Raises `CheckpointError` when a file has changed since the checkpoint was opened."""
        wanted = []
        for read in reads:
            replaced = self._replaced.get(read.name)
            if replaced is None:
                wanted.append(read)
            else:
                read.destination.detach().copy_(replaced)
        if wanted:
            self._reader.carry_out(self._plan(wanted), [read.destination for read in wanted])

    def _plan(self, reads: Sequence[Read]) -> ReadPlan:
        """The plan for these reads. The same groups are read in every forward, so each plan is made once."""
        key = tuple((read.name, read.destination.dtype) for read in reads)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_reads([(self._transfers[name], dtype, True) for name, dtype in key])
        return plan

    def read_rows(self, name: str, rows: torch.Tensor, destination: torch.Tensor) -> None:
        """Fills `destination` (n, …) with the rows `rows` (n, int64, on CPU) of the first dimension of `name`.

        Only the bytes of these rows are read; neighbours in `rows` that are neighbours in the file are read together. Raises IndexError.
        """
        transfer = self._transfers[name]
        unique, places = torch.unique(rows, return_inverse=True)
        wanted = unique.tolist()
        if wanted and not (wanted[0] >= 0 and wanted[-1] < transfer.shape[0]):
            raise IndexError(f"{name!r} has rows 0 to {transfer.shape[0] - 1}; asked for {wanted[0]} to {wanted[-1]}.")
        replaced = self._replaced.get(name)
        if replaced is not None:
            destination.detach().copy_(replaced[rows])
        elif len(wanted) == len(rows):
            self._reader.read([(transfer.gathered(_runs(rows.tolist())), destination)])
        else:  # a row that is asked for several times is read once
            found = torch.empty((len(wanted), *transfer.shape[1:]), dtype=destination.dtype, device="cpu")
            self._reader.read([(transfer.gathered(_runs(wanted)), found)])
            destination.detach().copy_(found[places])

    def is_paged(self, name: str) -> bool:
        """Whether the tensor can be used on mapped pages of its file. Raises KeyError."""
        return name not in self._replaced and self._pages.can_hold(self._transfers[name])

    def pages(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Tensors on mapped pages of their files. Raises `CheckpointError` when a file has changed since the checkpoint was opened."""
        return self._pages.tensors([self._transfers[name] for name in names])

    def absent_pages(self, names: Sequence[str]) -> Callable[[], None] | None:
        """What reads the pages of these tensors that are not in memory, in any thread; None where samples say that all are."""
        return self._pages.absent([self._transfers[name] for name in names])

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replaces the value of `name` (same shape; any floating dtype) in RAM. Raises KeyError, and ValueError for another shape."""
        spec = self.spec(name)
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"{name!r} has shape {list(spec.shape)}; the new value has {list(value.shape)}.")
        self._replaced[name] = value.detach().to(device="cpu", dtype=spec.dtype, copy=True)
        self._pages.forget(name)

    def close(self) -> None:
        """Closes the files; a later read opens them again."""
        self._reader.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointStore:
        twin = CheckpointStore(self._transfers, folder=self._folder)
        twin._reader = self._reader
        twin._pages = copy.deepcopy(self._pages, memo)
        twin._replaced = copy.deepcopy(self._replaced, memo)
        return twin


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive rows: the first one, and how many."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((row, 1))
    return runs
