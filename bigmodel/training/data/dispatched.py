"""The loader whose data the main process reads for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ..gradient_state import GradientState
from ..state import PartialState
from .loader import END, PreparedLoader
from .mesh import data_shares
from .position import Resumption
from .sending import Channel, Note
from .sharing import Sharing, Step

__all__ = ["DataLoaderDispatcher"]


class DataLoaderDispatcher(PreparedLoader):
    """A `DataLoader` that the main process alone reads; it sends each process its batch, strings and uneven lengths too.

    Every process sees the same number of batches. A last step with too few samples is filled from the start of the data, unless short
    batches are dropped.

    Args:
        dataset: as for `torch.utils.data.DataLoader`; read in the main process.
        split_batches: the batches of the dataset are those of all processes together, and each gets a part; else each gets a batch.
        skip_batches: left out at the start of each epoch.
        use_stateful_dataloader: torchdata's loader reads.
        _drop_last: whether a short step at the end is dropped.
        _non_blocking: copies to the device do not wait.
        slice_fn: how batches are cut, `slice_fn(batch, slice, process_index=, num_processes=)`, on the main process.
        torch_device_mesh: processes along its tensor- and context-parallel dimensions get the same samples.
        iteration: the epoch to begin with.
        kwargs: the other arguments of `torch.utils.data.DataLoader`.
    """

    _sharing: Sharing

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ):
        self.state = PartialState()
        super().__init__(
            dataset,
            device=self.state.device,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            drop_last_of_all=_drop_last,
            non_blocking=_non_blocking,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self._share_of = list(range(self.state.num_processes)) if torch_device_mesh is None else data_shares(torch_device_mesh)
        self._shares = max(self._share_of) + 1

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all processes together at one step; None where batches have no size that is known."""
        size = getattr(self.batch_sampler, "batch_size", self.batch_size)
        return None if size is None else int(size) * self._read_at_once

    @property
    def own_batch_size(self) -> int | None:
        """Samples of this process at one step; None where batches have no size that is known."""
        size = self.total_batch_size
        return None if size is None else size // self._shares

    @property
    def _read_at_once(self) -> int:
        """Batches that are read for a step."""
        return 1 if self.split_batches else self._shares

    def __len__(self) -> int:
        batches = super().__len__()
        steps = batches // self._read_at_once if self._drop_last else -(-batches // self._read_at_once)
        return max(steps - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        channel = Channel(self._share_of, self.state.device, self._non_blocking)
        GradientState()._add_dataloader(self)
        position = self._position
        try:
            for batch, note in self._send(channel) if self.state.is_main_process else self._receive(channel):
                position.batches += 1
                position.finished = note.last
                self.remainder = note.real or -1
                if note.last:
                    self._tell_end(batch, note.real)
                yield batch
            position.finished = True
        finally:
            position.end()
            GradientState()._remove_dataloader(self)

    def _send(self, channel: Channel) -> Iterator[tuple[Any, Note]]:
        steps = self._steps()
        last = False
        while not last:
            try:
                step, last = next(steps, (None, True))
            except BaseException as error:
                channel.end(error)  # the others would wait for ever
                raise
            if step is None:  # no step at all, not even a first one
                channel.end()
            else:
                note = Note(step.real, last)
                yield channel.send(step.pieces, note), note

    def _steps(self) -> Iterator[tuple[Step | None, bool]]:
        """Every step, and whether it is the last."""
        groups = self._open()
        position, stateful, reads_here = self._position, self._stateful, self._reads_here()
        coming: Any = next(groups, END)
        while coming is not END:
            step = self._sharing.share(coming, self.split_batches)
            if stateful is not None:
                position.base = stateful.state_dict()
            if reads_here:
                position.ahead = torch.default_generator.get_state()
            coming = next(groups, END)
            yield step, coming is END

    def _receive(self, channel: Channel) -> Iterator[tuple[Any, Note]]:
        self._open()
        while (received := channel.receive()) is not None:
            yield received
            if received[1].last:
                return

    def _batches_from(self, start: int, going_on: Resumption | None) -> Iterator[Any]:
        if not self.state.is_main_process:
            return iter(())
        self._sharing = Sharing(self._shares, not self._drop_last, self.slice_fn)
        reads_a_stream = isinstance(self.dataset, IterableDataset) or self._stateful is not None
        if start and not self._drop_last and not reads_a_stream:
            # The end may have to be filled with samples that nobody reads again; reading them draws what is drawn once more below.
            assert self._position.start is not None
            self._sharing.remember(list(self._iterated(self._like_this(islice(self._indices, self._read_at_once)))))
            self._position.start.restore(self.own_generators())
        return self._groups(super()._batches_from(start * self._read_at_once, going_on))

    def _pass_over(self, batches: Iterator[Any], count: int) -> None:
        self._sharing.remember(list(islice(batches, min(count, self._read_at_once))))
        super()._pass_over(batches, count - self._read_at_once)

    def _groups(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """The batches of each step."""
        while group := list(islice(batches, self._read_at_once)):
            if self._drop_last and len(group) < self._read_at_once:
                return
            yield group
