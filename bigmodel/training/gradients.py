"""Gradients that wait for the batches that complete them: saved with the state of a job, and put back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open

from ..errors import CheckpointNotFoundError, MatchError, TrainingError
from ..loading import write_safetensors
from ..protocols import TensorSpec

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["forget_gradients", "gradients_wait", "load_gradients", "save_gradients"]

NAME: Final = "gradients"


def gradients_wait(accelerator: Accelerator) -> bool:
    """Whether this process has gradients that its optimizers have yet to step with."""
    state = accelerator.gradient_state
    waiting = state.gradients_wait or not state.sync_gradients
    return waiting and any(parameter.grad is not None for parameter in _trained(accelerator).values())


def save_gradients(accelerator: Accelerator, folder: Path) -> None:
    """Writes this process's gradients, one at a time, to a file of its own. Raises `TrainingError` for a sparse one."""
    gradients = {name: parameter.grad for name, parameter in _trained(accelerator).items() if parameter.grad is not None}
    sparse = [name for name, gradient in gradients.items() if gradient.layout != torch.strided]
    if sparse:
        raise TrainingError(
            f"The gradients of {', '.join(sparse[:10])} are sparse, and cannot be saved while they are accumulated: save where "
            "`accelerator.sync_gradients` is True."
        )
    specs = {name: TensorSpec(tuple(gradient.shape), gradient.dtype) for name, gradient in gradients.items()}
    with open(_file(folder, accelerator.process_index), "wb", buffering=0) as stream:
        write_safetensors(stream, specs, lambda name: gradients[name], {})


def forget_gradients(accelerator: Accelerator) -> None:
    """No parameter has a gradient, as where a state was saved that had none."""
    for parameter in _trained(accelerator).values():
        parameter.grad = None


def load_gradients(accelerator: Accelerator, folder: Path, there: int) -> None:
    """Gives parameters the gradients of a state; those that have none in it keep what they have.

    Args:
        there: how many processes saved theirs. Where that is not how many there are now, each gets the mean over them, which is what the
            step is taken with.

    Raises:
        CheckpointNotFoundError: no file of a process.
        MatchError: gradients of other parameters than there are.
    """
    parameters = _trained(accelerator)
    same = there == accelerator.num_processes
    for rank in (accelerator.process_index,) if same else range(there):
        file = _file(folder, rank)
        if not file.exists():
            raise CheckpointNotFoundError(f"{folder}: there is no {file.name}, the gradients that process {rank} had accumulated.")
        with safe_open(file, "pt") as opened:
            names: list[str] = opened.keys()
            for name in names:
                _add(parameters.get(name), opened.get_tensor(name), 1 if same else there, f"{file}: {name}")


def _add(parameter: torch.Tensor | None, gradient: torch.Tensor, parts: int, where: str) -> None:
    if parameter is None or parameter.shape != gradient.shape:
        here = "there is no such parameter" if parameter is None else f"the parameter has shape {tuple(parameter.shape)}"
        raise MatchError(f"{where} is a gradient of shape {tuple(gradient.shape)}; {here}. Prepare what was prepared when it was saved.")
    gradient = gradient.to(parameter.device, parameter.dtype)
    if parts > 1:
        gradient = gradient / parts
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{NAME}_{rank}.safetensors"


def _trained(accelerator: Accelerator) -> dict[str, Any]:
    """Parameters of prepared models, and those that optimizers have besides, each once."""
    found: dict[str, Any] = {}
    for index, model in enumerate(accelerator._models):
        for name, parameter in accelerator.unwrap_model(model, keep_torch_compile=False).named_parameters():
            if parameter.requires_grad:
                found[f"model_{index}.{name}"] = parameter
    known = {id(parameter) for parameter in found.values()}
    for index, optimizer in enumerate(accelerator._optimizers):
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found |= {f"optimizer_{index}.{number}": parameter for number, parameter in enumerate(own) if id(parameter) not in known}
    return found
