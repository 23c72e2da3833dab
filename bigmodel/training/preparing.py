"""What `Accelerator.prepare` makes of each object that it is given, whatever their order and number."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..errors import TrainingError
from .argument_types import wrong_thing
from .optimizer import AcceleratedOptimizer
from .scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["even_batches_set", "placements_of", "prepare_each", "prepared_optimizer", "prepared_scheduler"]

T = TypeVar("T")


def prepare_each(accelerator: Accelerator, objects: Sequence[Any], placements: Sequence[bool | None]) -> list[Any]:
    """Models, optimizers, data loaders and schedulers made ready, each by the accelerator's own method; other objects as they are.

    Schedulers come last, since they look for their optimizers among what is prepared.
    """
    ready = list(objects)
    later = []
    for position, (thing, placement) in enumerate(zip(objects, placements, strict=True)):
        if isinstance(thing, DataLoader):
            ready[position] = accelerator.prepare_data_loader(thing, device_placement=placement)
        elif isinstance(thing, nn.Module):
            ready[position] = accelerator.prepare_model(thing, device_placement=placement)
        elif isinstance(thing, torch.optim.Optimizer):
            ready[position] = accelerator.prepare_optimizer(thing, device_placement=placement)
        elif isinstance(thing, (LRScheduler, AcceleratedScheduler)):
            later.append(position)
    for position in later:
        ready[position] = accelerator.prepare_scheduler(objects[position])
    return ready


def placements_of(objects: Sequence[Any], device_placement: Sequence[bool | None] | None) -> list[bool | None]:
    """One placement for each object. Raises `TrainingError` where there are more or fewer."""
    if device_placement is None:
        return [None] * len(objects)
    if len(device_placement) != len(objects):
        raise TrainingError(f"device_placement has {len(device_placement)} entries for {len(objects)} objects; give one for each, or None.")
    return list(device_placement)


def prepared_optimizer(accelerator: Accelerator, optimizer: torch.optim.Optimizer, device_placement: bool) -> AcceleratedOptimizer:
    """The optimizer, stepping with the accelerator's accumulation and scaler; schedulers that were prepared before it follow it."""
    known = _known(accelerator._optimizers, "optimizer", optimizer)
    if known is not None:
        return known
    if not all(hasattr(optimizer, name) for name in ("step", "zero_grad", "param_groups")):
        raise wrong_thing("prepare_optimizer", "an optimizer (step, zero_grad, param_groups)", optimizer)
    accelerator.strategy.adopt_parameters(optimizer)
    scale = accelerator.loss_scale
    ready = AcceleratedOptimizer(
        optimizer, device_placement, None if scale is None else scale.scaler, None if scale is None else scale.note_step
    )
    accelerator._optimizers.append(ready)
    for scheduler in accelerator._schedulers:
        if getattr(scheduler.scheduler, "optimizer", None) is optimizer:
            scheduler.optimizers = [ready]
    return ready


def prepared_scheduler(accelerator: Accelerator, scheduler: Any) -> AcceleratedScheduler:
    """The scheduler, stepping with the prepared optimizer that it was made for; with all of them, where it does not say."""
    known = _known(accelerator._schedulers, "scheduler", scheduler)
    if known is not None:
        return known
    if not hasattr(scheduler, "step"):
        raise wrong_thing("prepare_scheduler", "a scheduler (step)", scheduler)
    own = getattr(scheduler, "optimizer", None)
    followed = [each for each in accelerator._optimizers if own is each or own is each.optimizer] or list(accelerator._optimizers)
    ready = AcceleratedScheduler(
        scheduler, followed, accelerator.step_scheduler_with_optimizer, accelerator.split_batches, accelerator.strategy.data_processes
    )
    accelerator._schedulers.append(ready)
    return ready


@contextlib.contextmanager
def even_batches_set(loaders: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    """Prepared loaders fill up their last batches, or do not, for a while; None changes nothing. Warns of loaders that cannot."""
    samplers: list[Any] = [] if even_batches is None else [getattr(loader, "batch_sampler", None) for loader in loaders]
    changed = [(sampler, sampler.even_batches) for sampler in samplers if hasattr(sampler, "even_batches")]
    fixed = len(samplers) - len(changed)
    if fixed:
        warnings.warn(
            f"even_batches={even_batches} is only supported for map-style datasets that every process reads: {fixed} of {len(samplers)} "
            "prepared loaders read a stream, or are read by the main process, and stay as they are.",
            stacklevel=4,
        )
    for sampler, _ in changed:
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, before in changed:
            sampler.even_batches = before


def _known(prepared: Sequence[T], inside: str, thing: Any) -> T | None:
    """What an earlier call has made of the same object, or the object itself where it is prepared."""
    return next((each for each in prepared if each is thing or getattr(each, inside, None) is thing), None)
