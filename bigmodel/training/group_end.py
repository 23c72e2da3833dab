"""The end of process groups: what threads of gloo still hold by then would abort the process, after all its work is done.

A thread of gloo lets go of a collective's tensors after its caller has gone on, and needs the interpreter for it. Where the interpreter
is about to end, it gets it no more: CPython ends the thread in the midst of C++, which takes that for a crash, and later versions leave it
hanging. A group waits for its threads where it is destroyed, but where anything else holds it (`DistributedDataParallel` does) nothing is.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["end_groups", "settle_groups"]

PATIENCE_SECONDS = 1.0
"""How long the threads of all groups may take: a fraction of a millisecond each, but one may be in a collective that never ends."""

LOOK_SECONDS = 1e-4

_answered: list[Any] = []
"""Collectives that threads were last asked by, all answered: the last to let go of one shall not be a thread."""
_unanswered: list[Any] = []
"""Those of groups that are still in a collective: they hold their group, and its end would wait for the collective."""


def end_groups() -> None:
    """At the end of the process: every group ends, once its threads hold nothing any more."""
    if not dist.is_initialized():
        return
    settle_groups()
    # After an error the launcher ends the others; the end of a group might wait for them.
    if getattr(sys, "last_type", None) is None:
        dist.destroy_process_group()


def settle_groups(group: dist.ProcessGroup | None = None) -> None:
    """Returns once the threads of a group of gloo (None: of all) have let go of what they worked on; what never ends is left to them.

    The ranks cannot use the group together any more.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    _answered.clear()  # they hold groups that have ended since, with their threads
    for each in list(dist.distributed_c10d._world.pg_map) if group is None else [group]:
        if isinstance(each, dist.ProcessGroup):
            _settle(each, until)


def _settle(group: dist.ProcessGroup, until: float) -> None:
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it takes no tensors of the CPU
        return
    gloo: Any = getattr(dist, "ProcessGroupGloo", ())  # () where torch was built without
    if not isinstance(backend, gloo):
        return
    answered: set[int] = set()
    questions: list[Any] = []
    answers: list[weakref.ref[Any]] = []
    while len(answered) < backend.options._threads and time.monotonic() < until:
        answers = [answer for answer in answers if answer() is not None]
        answers.append(_ask(group, answered, questions))
    # Each thread lets go of its answer, too, before it is done.
    while any(answer() is not None for answer in answers) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    has_settled = len(answered) >= backend.options._threads and all(answer() is None for answer in answers)
    (_answered if has_settled else _unanswered).extend(questions)


def _ask(group: dist.ProcessGroup, answered: set[int], questions: list[Any]) -> weakref.ref[Any]:
    """Has one of the group's threads, whichever is free, put its name into `answered`; gives what it does so by.

    No elements are reduced by a thread of this rank without a word to the others. A thread that calls back from there holds nothing older.
    """
    asking = threading.get_ident()

    def answer(_: Any) -> None:
        if threading.get_ident() != asking:  # else the thread had gone on before it could be given this
            answered.add(threading.get_ident())
            time.sleep(LOOK_SECONDS)  # so that it is another one's turn

    work = dist.all_reduce(torch.empty(0), group=group, async_op=True)
    assert work is not None
    questions.extend((work, work.get_future().then(answer)))
    return weakref.ref(answer)
