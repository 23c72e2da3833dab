"""Which group comes next: learned from the forwards so far, checked at every step."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import torch

from .group import Group
from .origin import Tally
from .pool import Pool

__all__ = ["Schedule"]

_AHEAD_BYTES = 256 * 1024
"""Groups in RAM below this many bytes are read when they are needed: handing one to the reader thread takes about as long (30 µs)."""

_LOOK_AHEAD = 8
"""How many groups that need no transfer are looked past."""


class Schedule:
    """The pools and the order of the groups of one dispatched model.

    The successor of a group is looked up by the last two groups of the same thread (by the last one alone while the pair is new), so that
    a block that runs twice in one forward, with different successors, is predicted right. The last group of a forward is followed by the
    first one of the next.
    """

    def __init__(self, *, prefetch: bool = True, ring_bytes: int | None = None) -> None:
        self.prefetch = prefetch
        self.ring_bytes = ring_bytes
        self.tally = Tally()
        self.pools: dict[torch.device, Pool] = {}
        self.groups: list[Group] = []
        self.relearned = 0
        """Steps at which another group came than the one that was expected."""
        self._after: dict[tuple[Group | None, Group], Group] = {}
        self._trail = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        made = Schedule(prefetch=self.prefetch, ring_bytes=self.ring_bytes)
        memo[id(self)] = made
        made.pools = {device: deepcopy(pool, memo) for device, pool in self.pools.items()}
        made.tally = deepcopy(self.tally, memo)
        # Groups come with the hooks that are copied: a copied part of a model must not bring the whole model along.
        return made

    def pool(self, device: torch.device) -> Pool:
        """The pool of an execution device."""
        if device not in self.pools:
            self.pools[device] = Pool(device, self.ring_bytes)
        return self.pools[device]

    def add(self, *groups: Group) -> None:
        """Makes groups known (for `placement`)."""
        self.groups += [group for group in groups if group not in self.groups]

    def tied(self, tensor: torch.Tensor) -> Group | None:
        """The group whose only weight is the placeholder `tensor`, if there is one: what uses it elsewhere brings that group too."""
        return next((group for group in self.groups if len(group.slots) == 1 and group.slots[0].resting is tensor), None)

    def remove(self, *groups: Group) -> None:
        """Forgets groups and, with the last one, frees all buffers."""
        self.groups = [group for group in self.groups if group not in groups]
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
        if self.prefetch and group.nbytes:
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
        for _ in range(_LOOK_AHEAD):
            following = self._after.get(here) or self._after.get((None, here[1]))
            if following is None or following is group:
                return
            here = (here[1], following)
            pool = following.pool
            if pool.device.type == "cpu" and following.nbytes < _AHEAD_BYTES:
                if not following.beside:
                    return
                continue
            if not pool.fetch_ahead(following):
                return
