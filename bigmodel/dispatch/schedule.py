"""Which group comes next: learned from the forwards so far, checked at every step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from ..constants import MiB
from .group import SMALL_BYTES, Group
from .origin import Tally
from .pool import Pool

__all__ = ["Schedule"]

_AHEAD_BYTES = SMALL_BYTES
"""Groups in RAM below this many bytes are not fetched ahead."""

_PAGES_AHEAD_BYTES = 128 * MiB
"""How far ahead of the arithmetic the system is told to read pages of files, in whole groups: enough to keep a disk busy meanwhile."""

_LOOK_AHEAD = 8
"""How many groups that need no transfer are looked past."""


class Schedule:
    """The pools and the order of the groups of one dispatched model.

    The successor of a group is looked up by the last two groups of the same thread (by the last one alone while the pair is new), so that
    a block that runs twice in one forward, with different successors, is predicted right. The last group of a forward is followed by the
    first one of the next. Before anything is known, groups are expected in the order of the model.
    """

    def __init__(self, *, prefetch: bool = True, rings: Mapping[torch.device, int] | None = None) -> None:
        self.prefetch = prefetch
        self.rings = dict(rings or {})
        """What the buffers on a device may take (bytes), where not simply two groups."""
        self.tally = Tally()
        self.pools: dict[torch.device, Pool] = {}
        self.groups: list[Group] = []
        self.relearned = 0
        """Steps at which another group came than the one that was expected."""
        self._after: dict[tuple[Group | None, Group], Group] = {}
        self._next: dict[Group, Group] | None = None
        """The order of the model, made when it is first asked for."""
        self._trail = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        made = Schedule(prefetch=self.prefetch, rings=self.rings)
        memo[id(self)] = made
        made.pools = {device: deepcopy(pool, memo) for device, pool in self.pools.items()}
        made.tally = deepcopy(self.tally, memo)
        # Groups come with the hooks that are copied: a copied part of a model must not bring the whole model along.
        return made

    def pool(self, device: torch.device) -> Pool:
        """The pool of an execution device."""
        if device not in self.pools:
            self.pools[device] = Pool(device, self.rings.get(device))
        return self.pools[device]

    def add(self, *groups: Group) -> None:
        """Makes groups known (for `placement`)."""
        self.groups += [group for group in groups if group not in self.groups]
        self._next = None

    def tied(self, tensor: torch.Tensor) -> Group | None:
        """The group whose only weight is the placeholder `tensor`, if there is one: what uses it elsewhere brings that group too."""
        return next((group for group in self.groups if len(group.slots) == 1 and group.slots[0].resting is tensor), None)

    def remove(self, *groups: Group) -> None:
        """Forgets groups and, with the last one, frees all buffers."""
        self.groups = [group for group in self.groups if group not in groups]
        self._next = None
        for pool in {group.pool for group in groups}:
            pool.forget(groups)
        self._after = {}
        self._trail = threading.local()
        if not self.groups:
            self.close()

    def close(self) -> None:
        """Ends the reader threads and frees the buffers."""
        for pool in self.pools.values():
            pool.close()

    def enter(self, group: Group) -> None:
        """Enters the group and starts fetching the one that is expected next."""
        group.enter()
        if self.prefetch and group.layout.travels:
            try:
                self._step(group)
            except BaseException:
                group.exit()
                raise

    def abort(self) -> None:
        """A forward of this thread failed: what comes next is no successor of what came last."""
        self._trail.last = None

    def _step(self, group: Group) -> None:
        last: tuple[Group | None, Group] | None = getattr(self._trail, "last", None)
        if last is not None and last[1] is group:
            here = last  # another of the modules that use the group, or the same once more: what comes after it stays the same
        else:
            if last is not None and self._after.get(last) is not group:
                self.relearned += last in self._after
                self._after[last] = group
                self._after[(None, last[1])] = group
            self._trail.last = here = (None if last is None else last[1], group)
        paged_bytes = 0
        for _ in range(_LOOK_AHEAD):
            following = self._after.get(here) or self._after.get((None, here[1])) or self._next_in_model(here[1])
            if following is None or following is group:
                return
            here = (here[1], following)
            pool = following.pool
            if pool.device.type == "cpu" and following.nbytes + following.paged_bytes < _AHEAD_BYTES:
                if not following.beside:
                    return
                continue
            if following.paged_bytes:
                pool.read_ahead(following)
                paged_bytes += following.paged_bytes
                if paged_bytes >= _PAGES_AHEAD_BYTES:
                    return
            if not pool.fetch_ahead(following):
                return

    def _next_in_model(self, group: Group) -> Group | None:
        if self._next is None:
            self._next = dict(itertools.pairwise(self.groups))
        return self._next.get(group)
