"""`python -m bigmodel.training.self_check`, launched as a job is: whether its processes meet, exchange values and train one model."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..errors import TrainingError
from .accelerator import Accelerator
from .enums import DistributedType
from .random import set_seed

__all__ = ["check"]

STEPS: Final = 8
ROWS: Final = 4
"""Rows in a batch of each process."""

ENGINES: Final = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Their settings belong to a model: training with them is for the script that has it."""


def check() -> str:
    """Gathers a number of every process and trains a small model, of which each has a copy. Returns what was tried, for people.

    Raises `TrainingError` where a number is missing, copies differ, or the loss does not fall.
    """
    accelerator = Accelerator()
    count = accelerator.num_processes
    own = torch.tensor([accelerator.process_index], device=accelerator.device)
    seen = accelerator.gather(own).tolist()
    if seen != list(range(count)):
        raise TrainingError(f"The {count} processes gathered {seen} of their numbers 0 to {count - 1}.")
    kind = accelerator.distributed_type
    processes = "1 process" if count == 1 else f"{count} processes"
    where = f"{processes} ({kind.value}, first on {accelerator.device}, mixed_precision={accelerator.mixed_precision})"
    if kind in ENGINES:
        return f"{where}: they meet and gather; what {kind.value} is set to is tried by training."
    losses, copies = _train(accelerator)
    if not (copies == copies[:1]).all():
        raise TrainingError(f"The {count} copies of a model differ after training: {copies.tolist()}.")
    if not losses[-1] < losses[0]:
        raise TrainingError(f"The loss of a model that learns a line did not fall: {losses}.")
    return f"{where}: they meet, gather, and train one model."


def _train(accelerator: Accelerator) -> tuple[list[float], torch.Tensor]:
    """The mean loss of each step, and the weights of every process's copy, one row each."""
    set_seed(0)
    model: Any = nn.Linear(1, 1)
    inputs = torch.linspace(-1, 1, STEPS * ROWS * accelerator.num_processes).unsqueeze(1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.2)
    loader: Any = DataLoader(TensorDataset(inputs, 3 * inputs + 1), ROWS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for batch, targets in loader:
        loss = nn.functional.mse_loss(model(batch).float(), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return losses, accelerator.gather(weights.unsqueeze(0))


if __name__ == "__main__":
    told = check()
    accelerator = Accelerator()
    accelerator.print(told)
    accelerator.end_training()
