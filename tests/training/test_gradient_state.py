"""Accumulation settings, and loops within loops."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from bigmodel.training.gradient_state import GradientState


@dataclass
class Plugin:
    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass(eq=False)
class Loader:
    end_of_dataloader: bool = False
    remainder: int = -1


def test_without_a_plugin_every_batch_steps() -> None:
    state = GradientState()
    assert state.initialized
    assert state.sync_gradients is True
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader, state.sync_each_batch) == (1, True, True, False)
    assert state.dataloader_references == [None]
    assert (state.active_dataloader, state.in_dataloader, state.end_of_dataloader, state.remainder) == (None, False, False, -1)


def test_all_instances_share_what_one_is_told() -> None:
    first = GradientState(Plugin(num_steps=4, adjust_scheduler=False))
    second = GradientState()
    assert (second.num_steps, second.adjust_scheduler) == (4, False)
    GradientState(Plugin(sync_with_dataloader=False, sync_each_batch=True))
    assert (first.num_steps, first.adjust_scheduler, first.sync_with_dataloader, first.sync_each_batch) == (1, True, False, True)
    second.plugin_kwargs["num_steps"] = 8
    second._set_sync_gradients(False)
    assert first.num_steps == 8
    assert first.sync_gradients is False
    GradientState._reset_state()
    assert GradientState().num_steps == 1
    assert GradientState().sync_gradients is True


def test_the_innermost_loop_is_the_active_one() -> None:
    state = GradientState()
    outer, inner = Loader(remainder=3), Loader(end_of_dataloader=True, remainder=5)
    state._add_dataloader(outer)
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (True, False, 3)
    state._add_dataloader(inner)
    assert state.dataloader_references == [None, outer, inner]
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (inner, True, 5)
    state._remove_dataloader(inner)
    state._remove_dataloader(inner)
    assert state.active_dataloader is outer
    state._add_dataloader(outer)
    state._remove_dataloader(outer)
    assert state.active_dataloader is outer, "the outer loop over the same loader goes on"
    state._remove_dataloader(outer)
    assert state.in_dataloader is False


def test_a_forgotten_loader_is_not_kept_alive() -> None:
    state = GradientState()
    outer, lost = Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(lost)
    del lost
    gc.collect()
    assert state.dataloader_references == [None, outer]
    assert state.active_dataloader is outer


def test_it_says_what_it_holds() -> None:
    state = GradientState(Plugin(num_steps=2))
    assert repr(state).splitlines()[0] == "Sync Gradients: True"
    assert "'num_steps': 2" in repr(state)
