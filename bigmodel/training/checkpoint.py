"""The whole state of a training job in one folder, from which it goes on as if it had never stopped."""

from __future__ import annotations

import os
import warnings
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..constants import RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME
from ..errors import TrainingError
from .checkpoint_folder import delete_oldest, filled_together, latest_checkpoint, next_checkpoint, read_manifest, together
from .collectives import broadcast_object_list, gather_object
from .gradients import forget_gradients, gradients_wait, load_gradients, save_gradients
from .random import restore_rng_states, rng_states
from .training_files import file_name, read_plain, write_plain

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["load_training_state", "save_training_state"]

CUSTOM_NAME: Final = "custom_checkpoint"


def save_training_state(accelerator: Accelerator, output_dir: str | PathLike[str] | None, safe_serialization: bool, **kwargs: Any) -> Path:
    """Writes models, optimizers, schedulers, scaler, random states, positions of data loaders and registered objects. Returns the folder,
    as it was given.

    The folder appears when every process has written its part; an error leaves what was there before. See `Accelerator.save_state`.
    """
    project = accelerator.project_configuration
    named = project.automatic_checkpoint_naming
    if output_dir is None and not named:
        raise TrainingError("save_state needs a folder: give one, or set ProjectConfiguration(automatic_checkpoint_naming=True).")
    with together("save_state"):
        given = next_checkpoint(project) if named else Path(str(output_dir)).expanduser()
        folder = _whole_path(given)
    facts = {
        "format": 1,
        "num_processes": accelerator.num_processes,
        "data_processes": accelerator.strategy.data_processes,
        "mixed_precision": accelerator.mixed_precision,
        "step": accelerator.step,
        "iteration": project.iteration,
        "sync_gradients": accelerator.sync_gradients,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
    }
    with together("save_state"):
        own = {
            "random": rng_states(),
            "positions": [loader.state_dict() for loader in accelerator._dataloaders],
            "gradients": gradients_wait(accelerator),
        }
    of_ranks: list[dict[str, Any]] = gather_object([own])
    with filled_together(folder, accelerator._writes_files, facts) as temporary:
        _save_models(accelerator, temporary, safe_serialization, kwargs)
        for index, optimizer in enumerate(accelerator._optimizers):
            accelerator.strategy.save_optimizer(optimizer, index, temporary)
        facts["gradients"] = _save_gradients(accelerator, temporary, any(of_rank["gradients"] for of_rank in of_ranks))
        if accelerator._writes_files:
            _save_small(accelerator, temporary, of_ranks)
    if named:
        with together("Deleting the oldest checkpoint"):
            if accelerator._writes_files:
                delete_oldest(project)
    project.iteration += 1
    place = given if given.is_dir() else folder
    written = [place]
    broadcast_object_list(written)  # processes of one host may have named it by their clocks
    return place if folder.is_dir() else written[0]


def _whole_path(folder: str | PathLike[str]) -> Path:
    return Path(os.path.abspath(Path(folder).expanduser()))


def _save_models(accelerator: Accelerator, folder: Path, safe_serialization: bool, kwargs: dict[str, Any]) -> None:
    models = list(accelerator._models)
    strategy = accelerator.strategy
    weights = [strategy.state_to_save(model, **kwargs) for model in models]
    before = list(weights)
    with together("A hook of save_state"):
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(models, weights, str(folder))
    # Hooks take models, or their weights, off the lists when they save them in their own way.
    kept = {id(state) for state in weights}
    for index, (model, state) in enumerate(zip(accelerator._models, before, strict=True)):
        if id(state) in kept and any(each is model for each in models):
            strategy.save_model(model, index, state, folder, safe_serialization)


def _save_gradients(accelerator: Accelerator, folder: Path, are_there: bool) -> bool:
    """Whether gradients of an accumulation are in the state, as they are if some process has some; what cannot be saved is told."""
    if accelerator.strategy.keeps_gradients:
        if not are_there:
            return False
        if all(gather_object([folder.is_dir()])):
            save_gradients(accelerator, folder)
            return True
        why = f"some processes do not see {folder.parent} (ProjectConfiguration(save_on_each_node=True) saves on every host)"
    elif are_there or not accelerator.sync_gradients:
        why = f"{accelerator.distributed_type.value} keeps them in parts of its own"
    else:
        return False
    warnings.warn(
        f"The state is saved while gradients are accumulated (batch {accelerator.step} of {accelerator.gradient_accumulation_steps} "
        f"to a step), and they are not part of it: {why}. Save where `accelerator.sync_gradients` is True for an exact continuation.",
        stacklevel=4,
    )
    return False


def _save_small(accelerator: Accelerator, folder: Path, of_ranks: list[dict[str, Any]]) -> None:
    """What one process writes for all: it is little, and comes from the other processes over the group."""
    for index, scheduler in enumerate(accelerator._schedulers):
        write_plain(scheduler.state_dict(), folder / file_name(SCHEDULER_NAME, index, ".bin"), f"scheduler {index}")
    for index in range(len(accelerator._dataloaders)):
        each = [of_rank["positions"][index] for of_rank in of_ranks]
        write_plain(each, folder / file_name(SAMPLER_NAME, index, ".bin"), f"data loader {index}")
    if accelerator.loss_scale is not None:
        accelerator.loss_scale.update()
        write_plain(accelerator.loss_scale.scaler.state_dict(), folder / SCALER_NAME, "the gradient scaler")
    for rank, of_rank in enumerate(of_ranks):
        write_plain(of_rank["random"], folder / f"{RNG_STATE_NAME}_{rank}.pkl", f"the random numbers of process {rank}")
    for index, thing in enumerate(accelerator._custom_objects):
        write_plain(thing.state_dict(), folder / f"{CUSTOM_NAME}_{index}.pkl", f"the registered {type(thing).__name__}")


def load_training_state(
    accelerator: Accelerator, input_dir: str | PathLike[str] | None, load_kwargs: dict[str, Any] | None, **kwargs: Any
) -> None:
    """Fills everything that is prepared and registered from a folder of `save_training_state`. See `Accelerator.load_state`."""
    project = accelerator.project_configuration
    if input_dir is None and not project.automatic_checkpoint_naming:
        raise TrainingError("load_state needs a folder: give one, or set ProjectConfiguration(automatic_checkpoint_naming=True).")
    map_location = _map_location(accelerator, load_kwargs)
    with together("load_state"):
        folder = latest_checkpoint(project) if input_dir is None else _whole_path(input_dir)
        facts = read_manifest(folder)
    _refuse_other_folders(folder, bool(facts))
    with together(f"Loading {folder}"):
        _refuse_other_objects(folder, accelerator._custom_objects)
        _load_models(accelerator, folder, kwargs)
        for index, optimizer in enumerate(accelerator._optimizers):
            accelerator.strategy.load_optimizer(optimizer, index, folder, map_location)
        _load_small(accelerator, folder)
        _load_gradients(accelerator, folder, facts)
        _load_places(accelerator, folder, facts)
    accelerator.step = int(facts.get("step", 0))
    accelerator.sync_gradients = bool(facts.get("sync_gradients", True))
    if project.automatic_checkpoint_naming:
        project.iteration = max(project.iteration, int(facts.get("iteration", -1)) + 1)


def _refuse_other_folders(folder: Path, holds_a_state: bool) -> None:
    found: list[tuple[str, bool]] = gather_object([(str(folder), holds_a_state)])
    if len({holds for _, holds in found}) > 1:
        rank, empty = next((rank, place) for rank, (place, holds) in enumerate(found) if not holds)
        full = next(place for place, holds in found if holds)
        raise TrainingError(
            f"load_state: process {rank} reads {empty}, which save_state has not written, and others read {full}. "
            "Give all processes of a host one folder: the one that save_state returned."
        )


def _refuse_other_objects(folder: Path, registered: list[Any]) -> None:
    saved = sorted(file.name for file in folder.glob(f"{CUSTOM_NAME}_*.pkl"))
    if len(saved) != len(registered):
        kinds = ", ".join(type(thing).__name__ for thing in registered) or "none"
        raise TrainingError(
            f"{folder} has the states of {len(saved)} registered objects ({', '.join(saved) or 'none'}), and {len(registered)} are "
            f"registered ({kinds}): give register_for_checkpointing as many as when it was saved, in the same order."
        )


def _map_location(accelerator: Accelerator, load_kwargs: dict[str, Any] | None) -> Any:
    options = dict(load_kwargs or {})
    place = options.pop("map_location", "cpu")
    if options:
        raise TrainingError(f"load_kwargs knows 'map_location', not {', '.join(sorted(options))}.")
    return accelerator.device if place == "on_device" else place


def _load_models(accelerator: Accelerator, folder: Path, kwargs: dict[str, Any]) -> None:
    models = list(accelerator._models)
    with together("A hook of load_state"):
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
    for index, model in enumerate(accelerator._models):
        if any(each is model for each in models):  # hooks take off the list what they load themselves
            accelerator.strategy.load_model(model, index, folder, **kwargs)


def _load_small(accelerator: Accelerator, folder: Path) -> None:
    for index, scheduler in enumerate(accelerator._schedulers):
        scheduler.load_state_dict(read_plain(folder / file_name(SCHEDULER_NAME, index, ".bin"), f"scheduler {index}"))
    if accelerator.loss_scale is not None:
        accelerator.loss_scale.update()  # what it owes to steps before is not the loaded scale's
        accelerator.loss_scale.scaler.load_state_dict(read_plain(folder / SCALER_NAME, "the gradient scaler"))
    for index, thing in enumerate(accelerator._custom_objects):
        thing.load_state_dict(read_plain(folder / f"{CUSTOM_NAME}_{index}.pkl", f"the registered {type(thing).__name__}"))


def _load_gradients(accelerator: Accelerator, folder: Path, facts: dict[str, Any]) -> None:
    if not accelerator.strategy.keeps_gradients:
        return
    forget_gradients(accelerator)
    accelerator.gradient_state.gradients_wait = waits = bool(facts.get("gradients"))
    if not waits:
        return
    load_gradients(accelerator, folder, facts["num_processes"])
    steps = facts["gradient_accumulation_steps"]
    if steps != accelerator.gradient_accumulation_steps:
        warnings.warn(
            f"{folder} was saved in the middle of an accumulation of {steps} batches: its gradients are divided by {steps}, "
            f"those to come by {accelerator.gradient_accumulation_steps}.",
            stacklevel=4,
        )


def _load_places(accelerator: Accelerator, folder: Path, facts: dict[str, Any]) -> None:
    """Where loaders and random numbers stood in this process. Random numbers last: what is loaded may draw some."""
    rank, count, shares = accelerator.process_index, accelerator.num_processes, accelerator.strategy.data_processes
    there = facts.get("num_processes")
    if there is None:
        warnings.warn(f"{folder} was not written by bigmodel: data loaders and random numbers do not go on from it.", stacklevel=4)
        return
    if there != count:
        warnings.warn(
            f"{folder} was saved by {there} processes and is loaded by {count}: data loaders begin their epoch again"
            f"{'' if count < there else f', and processes from {there} on have random numbers of their own'}.",
            stacklevel=4,
        )
    elif facts.get("data_processes", there) != shares:
        warnings.warn(
            f"{folder} was saved by {facts['data_processes']} processes with samples of their own and is loaded by {shares}: data loaders "
            "begin their epoch again.",
            stacklevel=4,
        )
    for index, loader in enumerate(accelerator._dataloaders):
        positions = read_plain(folder / file_name(SAMPLER_NAME, index, ".bin"), f"data loader {index}")
        if there != count or facts.get("data_processes", there) != shares:
            loader.iteration = positions[0]["epoch"]
        else:
            loader.load_state_dict(positions[rank])
    if rank < there:
        restore_rng_states(read_plain(folder / f"{RNG_STATE_NAME}_{rank}.pkl", f"the random numbers of process {rank}"))
